"""Which blocks the requests have, on both sides."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvpd._kvpd import runs
from kvpd.errors import PlanError

Ids = NDArray[np.int32]
# (local ids, remote ids), position by position, in the engine's order.
Request = tuple[Ids, Ids]

SYNTHETIC = ("consecutive", "reversed", "random")


@dataclass(frozen=True)
class Workload:
    """Requests that are moved one after another, and timed together.

    Attributes:
        pattern: "consecutive", "reversed", "random" or "recorded NAME".
        requests: block ids of each.
    """

    pattern: str
    requests: list[Request]

    @property
    def num_blocks(self) -> int:
        """Blocks of all requests."""
        return sum(len(local) for local, _ in self.requests)

    @property
    def pages_per_run(self) -> tuple[float, float]:
        """Blocks per maximal consecutive stretch: on both sides at once, on the prefill alone."""
        joint = sum(len(runs(local, remote)) for local, remote in self.requests)
        alone = sum(1 + int((np.diff(np.sort(ids)) != 1).sum()) for _, ids in self.requests)
        return self.num_blocks / max(joint, 1), self.num_blocks / max(alone, 1)


def synthetic(pattern: str, count: int, num_blocks: int) -> Workload:
    """One request of `count` blocks out of `num_blocks`, the same in every run.

    Raises:
        PlanError: an unknown pattern, or more blocks than the cache has.
    """
    if count > num_blocks or pattern not in SYNTHETIC:
        raise PlanError(
            f"{count} {pattern} blocks of {num_blocks}",
            code="pattern",
            field="blocks",
            got=f"{count} {pattern}",
            expected=f"at most {num_blocks}, of {', '.join(SYNTHETIC)}",
        )
    rng = np.random.default_rng(11)
    if pattern == "random":
        local, remote = rng.permutation(num_blocks)[:count], rng.permutation(num_blocks)[:count]
    else:
        local = np.arange(count) + (num_blocks - count) // 2
        remote = np.arange(count)
        if pattern == "reversed":
            local, remote = local[::-1], remote[::-1]
    return Workload(pattern, [(_ids(local), _ids(remote))])


def recorded(paths: Sequence[Path], num_blocks: int, max_requests: int) -> Iterator[Workload]:
    """A workload for each trace: its longest requests, in the order in which they came.

    Raises:
        PlanError: a file is no trace, or names blocks that the cache has not.
    """
    for path in paths:
        try:
            entries = json.loads(path.read_text())["requests"]
            requests = [(_ids(entry["local"]), _ids(entry["remote"])) for entry in entries]
        except (OSError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise PlanError(
                f"{path} is no trace of block ids: {error!r}",
                code="trace",
                field="traces",
                got=path,
                expected='{"requests": [{"local": [...], "remote": [...]}, ...]}',
            ) from error
        longest = sorted(range(len(requests)), key=lambda at: -len(requests[at][0]))[:max_requests]
        chosen = [requests[at] for at in sorted(longest) if len(requests[at][0])]
        largest = max((int(ids.max()) for request in chosen for ids in request), default=0)
        if largest >= num_blocks:
            raise PlanError(
                f"{path} names block {largest} of {num_blocks}",
                code="trace-blocks",
                field="cache_blocks",
                got=num_blocks,
                expected=f"at least {largest + 1}",
            )
        yield Workload(f"recorded {path.stem}", chosen)


def _ids(values: Sequence[int] | NDArray[np.signedinteger]) -> Ids:
    return np.ascontiguousarray(np.asarray(values, dtype=np.int64).astype(np.int32))
