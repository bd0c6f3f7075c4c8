"""Regions, runs and plans through the bindings: types, errors, and a second oracle for ids."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvpd

SHAPE: dict[str, Any] = {"heads": 2, "tokens": 16, "head_dim": 64, "dtype": "bfloat16"}
STANDARD = kvpd.PageFormat.standard(**SHAPE)
SHUFFLED = kvpd.PageFormat.aiter_shuffle(**SHAPE)


def cache(format: kvpd.PageFormat, layout: str, num_blocks: int = 32) -> tuple[kvpd.Region, ...]:
    layers = ["layers.0", "layers.1", "layers.2"]
    return kvpd.cache_regions(format, layout, address=1 << 20, num_blocks=num_blocks, layers=layers)


def test_regions_carry_what_they_were_given() -> None:
    k, v = cache(SHUFFLED, "LHBNC")[:2]
    assert (k.planes, v.planes) == ((kvpd.PlaneSpan(0, 0, 4096),), (kvpd.PlaneSpan(1, 0, 4096),))
    assert (k.format, k.layers, k.memory, k.device) == (SHUFFLED, ("layers.0",), "dram", 0)
    assert v.address == k.address + 32 * 4096
    assert v.block_address(3) == v.address + 3 * 4096
    again = kvpd.Region(v.address, 32, 4096, 4096, format=SHUFFLED, planes=[1], layers=["layers.0"])
    assert again == v and hash(again) == hash(v)


@pytest.mark.parametrize(
    ("arguments", "options", "code", "field"),
    [
        ((0, 12, 884736, 73728), {}, "length-over-stride", "block_bytes"),
        ((0, 2, 512, 512), {"extent_bytes": 1023}, "out-of-extent", "end of the last block"),
        ((2**64 - 1, 1, 1, 1), {}, "overflow", "address + extent_bytes"),
        ((0, 0, 1, 1), {}, "out-of-range", "num_blocks"),
        ((0, 1, 4096, 4096), {"planes": [0]}, "planes", "planes"),
        ((0, 1, 4096, 4096), {"format": SHUFFLED, "planes": [2]}, "no-such-span", "planes"),
        ((0, 1, 4096, 4096), {"format": SHUFFLED}, "span-bytes", "block_bytes"),
        ((0, 1, 1, 1), {"memory": "tape"}, "unknown-word", "memory"),
        ((0, 1, 1, 1), {"layers": ["a\n"]}, "layers", "layers"),
    ],
)
def test_bad_regions_are_typed_errors(
    arguments: tuple[int, int, int, int], options: dict[str, Any], code: str, field: str
) -> None:
    with pytest.raises(kvpd.RegionError) as error:
        kvpd.Region(*arguments, **options)
    assert (error.value.code, error.value.field) == (code, field)


def test_numbers_that_are_no_64_bit_numbers_are_pythons_errors() -> None:
    with pytest.raises(OverflowError):
        kvpd.Region(-1, 1, 1, 1)
    with pytest.raises(TypeError):
        kvpd.Region("0", 1, 1, 1)  # type: ignore[arg-type]


def test_a_layout_against_the_format_is_refused() -> None:
    with pytest.raises(kvpd.RegionError) as error:
        cache(STANDARD, "NHD")
    assert error.value.code == "layout-against-format"
    with pytest.raises(kvpd.RegionError) as error:
        cache(STANDARD, "LBHCN")
    assert error.value.code == "unknown-layout"


PAIRS = st.dictionaries(st.integers(0, 31), st.integers(0, 31), max_size=20).map(
    lambda pairs: list({remote: (local, remote) for local, remote in pairs.items()}.values())
)


@given(PAIRS, st.sampled_from([list, np.int32, np.int64]))
def test_ids_are_numpys_broadcast_add_over_sorted_pairs(
    pairs: list[tuple[int, int]], kind: Any
) -> None:
    make = list if kind is list else lambda ids: np.array(ids, dtype=kind)
    local, remote = make([pair[0] for pair in pairs]), make([pair[1] for pair in pairs])
    runs = kvpd.runs(local, remote)
    order = sorted(pairs, key=lambda pair: pair[1])
    assert list(zip(runs.local_ids.tolist(), runs.remote_ids.tolist(), strict=True)) == order
    assert runs.num_pages == len(pairs) == sum(run.num_pages for run in runs)

    plan = kvpd.TransferPlan(cache(SHUFFLED, "LHBNC", 33), cache(STANDARD, "LBHNC", 40))
    assert plan.num_rows == 6
    for found, blocks, rows, count in (
        (plan.descriptor_ids(runs)[0], runs.local_ids, plan.local_rows, 33),
        (plan.descriptor_ids(runs)[1], runs.remote_ids, plan.remote_rows, 40),
    ):
        assert found.dtype == np.int32 and found.flags.c_contiguous
        expected = (np.arange(6)[:, None] * count + blocks[None, :]).ravel()
        np.testing.assert_array_equal(found, expected)
        assert rows.dtype == np.uint64 and rows.shape == (6, 5)
        assert set(rows[:, 4].tolist()) == {count}
    assert plan.num_descriptors(runs) == 6 * len(pairs)


def test_rows_are_address_bytes_device_stride_count() -> None:
    """Written out by hand: 3 layers of a 4,096-byte K block and V block, from 8,192-byte pages."""
    plan = kvpd.TransferPlan(cache(SHUFFLED, "LHBNC"), cache(STANDARD, "LBHNC"))
    base, half = 1 << 20, 4096
    local = [[base + plane * 32 * half, half, 0, half, 32] for plane in range(6)]
    remote = [
        [base + layer * 32 * 2 * half + part * half, half, 0, 2 * half, 32]
        for layer in range(3)
        for part in range(2)
    ]
    assert plan.local_rows.tolist() == local
    assert plan.remote_rows.tolist() == remote
    assert (plan.local_memory, plan.remote_memory) == ("dram", "dram")
    assert plan.page_bytes_all_layers == 3 * 2 * half


def test_bytes_of_a_slab() -> None:
    assert kvpd.slab_bytes(cache(STANDARD, "LBHNC"), num_pages=8) == 3 * 8 * 8192


def test_runs_are_a_sequence() -> None:
    runs = kvpd.runs([9, 8, 7, 3], [5, 4, 3, 9])
    first, last = runs
    assert (first.local, first.remote, first.num_pages) == (7, 3, 3)
    assert runs[-1] == last and len(runs) == 2
    with pytest.raises(IndexError):
        runs[2]


@pytest.mark.parametrize(
    ("local", "remote", "code"),
    [
        ([1], [], "length-mismatch"),
        ([1, 1], [2, 3], "duplicate-block"),
        ([1, 2], [3, 3], "duplicate-block"),
        ([-1], [0], "block-id"),
        ([0], [2**31], "block-id"),
        ([0], [2**63], "block-id"),
        ([-(2**63) - 1], [0], "block-id"),
    ],
)
def test_bad_ids_are_typed_errors(local: list[int], remote: list[int], code: str) -> None:
    with pytest.raises(kvpd.PlanError) as error:
        kvpd.runs(local, remote)
    assert error.value.code == code


def test_ids_must_be_integers() -> None:
    for ids in ([0.5], np.array([0.0]), np.zeros((1, 1), dtype=np.int32), "0"):
        with pytest.raises(TypeError):
            kvpd.runs(ids, [0])  # type: ignore[arg-type]


def test_a_block_outside_the_cache_is_refused() -> None:
    plan = kvpd.TransferPlan(cache(SHUFFLED, "LHBNC"), cache(STANDARD, "LBHNC"))
    with pytest.raises(kvpd.PlanError) as error:
        plan.descriptor_ids(kvpd.runs([32], [0]))
    assert (error.value.code, error.value.got) == ("no-such-block", "32")
