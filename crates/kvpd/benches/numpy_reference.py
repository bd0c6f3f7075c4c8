"""numpy's broadcast add of row bases and block ids, both sides: the reference of `cargo bench`."""

from __future__ import annotations

import sys
import timeit

import numpy as np

for size in sys.argv[1:]:
    regions, blocks = map(int, size.split("x"))
    bases = np.arange(regions, dtype=np.int32)[:, None] * (4 * blocks)
    ids = np.random.default_rng(0).permutation(4 * blocks)[:blocks].astype(np.int32)[None, :]

    def both_sides(
        bases: np.ndarray = bases, ids: np.ndarray = ids
    ) -> tuple[np.ndarray, np.ndarray]:
        return (bases + ids).ravel(), (bases + ids).ravel()

    timer = timeit.Timer(both_sides)
    number, _ = timer.autorange()
    seconds = sorted(timer.repeat(repeat=9, number=number))[4] / number
    print(f"numpy broadcast add {size}: {seconds * 1e9 / (2 * regions * blocks):.3f} ns per id")
