"""The reference of `cargo bench`: numpy's broadcast add of row bases and block ids, both sides.

Where the bindings are installed, `TransferPlan.descriptor_ids` takes turns with it: both allocate.
"""

from __future__ import annotations

import sys
import timeit
from collections.abc import Callable
from typing import Any

import numpy as np


def contestants(regions: int, blocks: int) -> dict[str, Callable[[], Any]]:
    """What is timed, by name."""
    total = 4 * blocks
    bases = np.arange(regions, dtype=np.int32)[:, None] * total
    local, remote = (
        np.random.default_rng(seed).permutation(total)[:blocks].astype(np.int32) for seed in (0, 1)
    )
    found: dict[str, Callable[[], Any]] = {
        "numpy broadcast add": lambda: ((bases + local).ravel(), (bases + remote).ravel())
    }
    try:
        import kvpd
    except ImportError:
        return found
    page = kvpd.PageFormat.standard(heads=8, tokens=16, head_dim=128, dtype="bfloat16")
    layers = [str(layer) for layer in range(regions)]
    cache = kvpd.cache_regions(page, "LBHNC", address=1 << 40, num_blocks=total, layers=layers)
    plan = kvpd.TransferPlan(cache, cache)
    runs = kvpd.runs(local, remote)
    return found | {"kvpd.TransferPlan.descriptor_ids": lambda: plan.descriptor_ids(runs)}


def main() -> None:
    """One line per size and contestant: median and range of nine rounds, in turns."""
    for size in sys.argv[1:]:
        regions, blocks = map(int, size.split("x"))
        timers = {name: timeit.Timer(work) for name, work in contestants(regions, blocks).items()}
        number = {name: timer.autorange()[0] for name, timer in timers.items()}
        rounds: dict[str, list[float]] = {name: [] for name in timers}
        for _ in range(9):
            for name, timer in timers.items():
                rounds[name].append(timer.timeit(number[name]) / number[name])
        for name, seconds in rounds.items():
            low, *_, high = ns = sorted(one * 1e9 / (2 * regions * blocks) for one in seconds)
            print(f"{name} {size}: {ns[4]:.3f} ns per id ({low:.3f}-{high:.3f})")


if __name__ == "__main__":
    main()
