"""The contestants: each moves the same pages of the prefill into the decoder's cache."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvpd._kvpd import TransferPlan, runs
from kvpd.cli.transfer_bench.cache import Cache
from kvpd.cli.transfer_bench.patterns import Request, Workload
from kvpd.errors import TransferError
from kvpd.nixl import Agent
from kvpd.receive import Receiver
from kvpd.request import Ready
from kvpd.wire import Handshake

PATIENCE_SECONDS = 120.0


@dataclass
class Sample:
    """What moving one workload took; times and counts of all its requests.

    Attributes:
        total_seconds: from the engine's call until all pages are in the cache.
        read_seconds: until the last byte of the peer's memory was read.
        convert_seconds: what conversion added after that.
        post_seconds: the part spent posting, in the engine's thread.
        planned, merged: descriptors before and after merging, by the plan.
        counted: after merging, as NIXL counted; None when it counts nothing.
    """

    total_seconds: float = 0.0
    read_seconds: float = 0.0
    convert_seconds: float = 0.0
    post_seconds: float = 0.0
    planned: int = 0
    merged: int = 0
    counted: int | None = 0

    def count(self, counted: int | None) -> None:
        """Add what NIXL counted for some READs."""
        known = self.counted is not None and counted is not None
        self.counted = (self.counted or 0) + (counted or 0) if known else None


class Arm(Protocol):
    """One way to move pages.

    Attributes:
        name: in the table.
        converts: whether the pages arrive in the decoder's format, or stay the prefill's.
    """

    name: str
    converts: bool

    def run(self, workload: Workload) -> Sample:
        """Move all requests of a workload, one after another. Raises `TransferError`."""

    def predict(self, workload: Workload) -> float | None:
        """Seconds that its planner expects; None without a planner."""

    def explain(self, workload: Workload) -> str:
        """Why it moves the workload as it does, in words."""

    def close(self) -> None:
        """Let everything go."""


class StockArm:
    """vLLM's scheme for equal formats: whole pages, ids in the request's order, one READ."""

    name = "stock"
    converts = False

    def __init__(
        self, agent: Agent, cache: Cache, handshake: Handshake, wait: Callable[[], None]
    ) -> None:
        self._wait = wait
        self._agent = agent
        plan = TransferPlan(
            cache.regions(cache.scenario.standard, "LBHNC"), handshake.description.regions
        )
        self._peer = self._agent.add_peer(handshake.nixl_metadata)
        self._local = self._agent.prepare_local(plan.local_rows, plan.local_memory)
        self._remote = self._agent.prepare_remote(self._peer, plan.remote_rows, plan.remote_memory)
        # Every region has as many blocks, so the ids of row r begin at r * num_blocks.
        self._bases = np.arange(plan.num_rows, dtype=np.int32) * cache.scenario.num_blocks

    def run(self, workload: Workload) -> Sample:
        sample = Sample()
        for request in workload.requests:
            self._move(request, sample)
        sample.read_seconds = sample.total_seconds
        return sample

    def predict(self, workload: Workload) -> float | None:
        return None

    def explain(self, workload: Workload) -> str:
        return "one READ a request, row by row, ids as the engine has them"

    def close(self) -> None:
        for rows in (self._local, self._remote):
            self._agent.release_rows(rows)
        self._agent.remove_peer(self._peer)

    def _move(self, request: Request, sample: Sample) -> None:
        local_ids, remote_ids = request
        began = time.perf_counter()
        transfer = self._agent.read(
            self._local, self._of_rows(local_ids), self._remote, self._of_rows(remote_ids)
        )
        posted = time.perf_counter()
        state = self._agent.poll(transfer)
        while state == "active":
            if time.perf_counter() - began > PATIENCE_SECONDS:
                raise TransferError("a READ does not end", code="timeout", field="stock")
            self._wait()
            state = self._agent.poll(transfer)
        ended = time.perf_counter()
        counted = self._agent.telemetry(transfer)
        self._agent.release(transfer)
        if state != "done":
            raise TransferError(transfer.error, code="read-failed", field="stock")
        sample.total_seconds += ended - began
        sample.post_seconds += posted - began
        sample.planned += len(self._bases) * len(local_ids)
        breaks = (np.diff(local_ids) != 1) | (np.diff(remote_ids) != 1)
        sample.merged += len(self._bases) * (int(breaks.sum()) + 1)
        sample.count(None if counted is None else counted.num_descriptors)

    def _of_rows(self, blocks: NDArray[np.int32]) -> NDArray[np.int32]:
        ids: NDArray[np.int32] = (self._bases[:, None] + blocks[None, :]).ravel()
        return ids


class ReceiverArm:
    """kvpd's own receiver, as the connector runs it.

    Args:
        name: in the table.
        agent: with which the cache is registered.
        cache: the decoder's.
        handshake: the prefill's.
        wait: called between polls.
        must_be_direct: fail where the prefill's memory cannot be mapped.
        options: of the receiver.

    Raises:
        DirectError: it must be direct and cannot be.
        KvpdError: the pair cannot be served so.
    """

    converts = True

    def __init__(
        self,
        name: str,
        agent: Agent,
        cache: Cache,
        handshake: Handshake,
        wait: Callable[[], None],
        *,
        must_be_direct: bool = False,
        **options: Any,
    ) -> None:
        self.name = name
        self._wait = wait
        description = cache.description(cache.scenario.shuffled, "LHBNC")
        self._receiver = Receiver(agent, description, [cache.memory], convert=True, **options)
        try:
            self._peer = self._receiver.add_peer(handshake, must_be_direct=must_be_direct)
        except BaseException:
            self.close()
            raise
        self.num_notices = 0

    def run(self, workload: Workload) -> Sample:
        sample = Sample()
        for local_ids, remote_ids in workload.requests:
            self._move(local_ids, remote_ids, sample)
        return sample

    def predict(self, workload: Workload) -> float | None:
        plan = self._peer.planner.plan
        return sum(plan(runs(*request)).predicted_seconds for request in workload.requests)

    def explain(self, workload: Workload) -> str:
        longest = max(workload.requests, key=lambda request: len(request[0]))
        return f"{self._peer.explain()}\n{self._peer.planner.plan(runs(*longest)).explain()}"

    def close(self) -> None:
        self._receiver.close()

    def _move(
        self, local_ids: NDArray[np.int32], remote_ids: NDArray[np.int32], sample: Sample
    ) -> None:
        request_id = f"{self.name}/{self.num_notices}"
        self.num_notices += 1
        began = time.perf_counter()
        self._receiver.start(request_id, self._peer, local_ids, remote_ids)
        outcomes = self._receiver.poll()
        while not outcomes:
            if time.perf_counter() - began > PATIENCE_SECONDS:
                raise TransferError("a request does not end", code="timeout", field=self.name)
            self._wait()
            outcomes = self._receiver.poll()
        ended = time.perf_counter()
        outcome = outcomes[0]
        if not isinstance(outcome, Ready):
            raise TransferError(outcome.reason, code=outcome.code, field=self.name)
        if outcome.notice_error:
            raise TransferError(outcome.notice_error, code="notice", field=self.name)
        sample.total_seconds += ended - began
        sample.read_seconds += outcome.timings.queued_seconds + outcome.timings.read_seconds
        sample.convert_seconds += outcome.timings.convert_seconds
        sample.post_seconds += outcome.post_seconds
        sample.planned += outcome.descriptors.planned
        sample.merged += outcome.descriptors.merged
        sample.count(outcome.descriptors.counted)
