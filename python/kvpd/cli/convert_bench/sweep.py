"""Kernel tunings worth a try."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from kvpd.cli.convert_bench.workloads import Placement
from kvpd.convert.plan import IN_PLACE, OUT_OF_PLACE, Tuning


def tunings(placement: Placement, page_bytes: int) -> Iterator[Tuning]:
    """The default first, then each question by itself."""
    yield IN_PLACE if placement == "in-place" else OUT_OF_PLACE
    if placement == "staged":
        # Small programs hide each other's latency; large ones load more before they wait.
        for tile_bytes, thread_bytes in product((8192, 16384, 32768), (64, 128, 256)):
            yield Tuning(tile_bytes, tile_bytes, thread_bytes)
        yield Tuning(8192, 8192, gather=True)
        yield Tuning(16384, 16384, num_programs=1056)
        return
    # How much a program holds, what is exchanged at a time, threads, reading order.
    parts = [size for size in (32768, 65536, 131072) if size <= max(page_bytes, 65536)]
    for part_bytes, tile_bytes, thread_bytes in product(parts, (32768, 65536), (128, 256, 512)):
        if tile_bytes <= part_bytes:
            yield Tuning(tile_bytes, part_bytes, thread_bytes)
    yield Tuning(65536, 65536, gather=True)
