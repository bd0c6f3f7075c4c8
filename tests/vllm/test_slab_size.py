"""The slab's default: who has one, and how large it is on a fuller and fuller GPU."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from kvpd.vllm.config import ConnectorConfig
from kvpd.vllm.slab_size import DeviceMemory, default_size, takes_default

MIB, GIB = 1 << 20, 1 << 30
PAGE = 65536
# 141 GB at 0.9: vLLM has left 5 GiB of its share for graphs and activations.
USUAL = DeviceMemory(140 * GIB, 19 * GIB, 121 * GIB, 0.9)


def test_only_a_reader_that_converts_on_a_gpu_and_cannot_sleep_has_one() -> None:
    found = {
        (convert, slab_bytes, *where)
        for convert, slab_bytes, *where in product(
            (False, True), (None, 0, GIB), (False, True), (False, True), (False, True)
        )
        if takes_default(
            ConnectorConfig(page_format_conversion=convert, slab_bytes=slab_bytes),
            is_reader=where[0],
            is_on_gpu=where[1],
            can_sleep=where[2],
        )
    }
    assert found == {(True, None, True, True, False)}


def test_a_usual_gpu_has_all_of_it_and_nothing_is_said() -> None:
    size = default_size(USUAL, PAGE)
    assert (size.num_bytes, size.note) == (512 * MIB, "")


@pytest.mark.parametrize(
    ("memory", "slab_mib"),
    [
        # What vLLM may still take is kept: 126 - 110 GiB, so that 1 GiB of 17 is left.
        (replace(USUAL, free_bytes=17 * GIB, taken_bytes=110 * GIB), 256),
        # It has taken all of its share already, yet graphs may come on top: 4 GiB are kept.
        (replace(USUAL, free_bytes=5 * GIB, taken_bytes=127 * GIB), 256),
        (replace(USUAL, free_bytes=4 * GIB + 4 * MIB, taken_bytes=127 * GIB), 1),
        (replace(USUAL, free_bytes=6 * GIB, taken_bytes=127 * GIB), 512),
        # The cache's size was given, so what vLLM still takes is unknown.
        (replace(USUAL, free_bytes=9 * GIB, taken_bytes=1 * GIB, utilization=None), 256),
        (replace(USUAL, free_bytes=19 * GIB, utilization=None), 512),
    ],
)
def test_a_fuller_one_a_quarter_of_what_is_left(memory: DeviceMemory, slab_mib: int) -> None:
    size = default_size(memory, PAGE)
    assert size.num_bytes == slab_mib * MIB
    assert (f"the slab has {slab_mib} MiB, not 512 MiB" in size.note) == (slab_mib < 512)


@pytest.mark.parametrize(
    "free_bytes", [4 * GIB + 4 * PAGE - 4, 4 * GIB, 1 * GIB, 0], ids=["almost a page", "", "", ""]
)
def test_a_full_one_none(free_bytes: int) -> None:
    size = default_size(replace(USUAL, free_bytes=free_bytes, taken_bytes=127 * GIB), PAGE)
    assert size.num_bytes == 0
    assert size.note.startswith("no slab, raw pages land in the cache (slower): of ")
    assert "or set slab_bytes" in size.note


def test_the_smallest_is_a_page() -> None:
    memory = replace(USUAL, free_bytes=4 * GIB + 4 * PAGE, taken_bytes=127 * GIB)
    assert default_size(memory, PAGE).num_bytes == PAGE
