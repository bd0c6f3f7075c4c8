"""The planner through the bindings: what it says, ids against numpy, errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kvpd

SHAPE: dict[str, Any] = {"heads": 2, "tokens": 16, "head_dim": 64, "dtype": "bfloat16"}
STANDARD = kvpd.PageFormat.standard(**SHAPE)
SHUFFLED = kvpd.PageFormat.aiter_shuffle(**SHAPE)
PAGE = 8192
LAYERS = [f"layers.{layer}" for layer in range(5)]
SLAB_ADDRESS = 1 << 40


def cache(format: kvpd.PageFormat, layout: str, num_blocks: int = 64) -> tuple[kvpd.Region, ...]:
    return kvpd.cache_regions(
        format, layout, address=1 << 20, num_blocks=num_blocks, layers=LAYERS, memory="vram"
    )


def planner(slab_pages: int = 0, **options: Any) -> kvpd.Planner:
    num_bytes = slab_pages * PAGE
    slab = kvpd.Region(SLAB_ADDRESS, 1, num_bytes, num_bytes, memory="vram") if slab_pages else None
    given: dict[str, Any] = {
        "link": kvpd.LinkModel("vram"),
        "max_pages": 64,
        "slab": slab,
    } | options
    return kvpd.Planner(cache(SHUFFLED, "LHBNC"), cache(STANDARD, "LBHNC"), **given)


RUNS = kvpd.runs([9, 1, 3, 5, 7, 40], [20, 5, 19, 4, 18, 63])


def test_ids_of_chunks_are_pages_of_the_slab() -> None:
    """Page p of layer position j of slot s, and block b of a layer, counted out in numpy."""
    planned = planner(48, in_place=False)
    plan = planned.plan(RUNS)
    assert (plan.placement, planned.placements, planned.converts) == ("staged", ["staged"], True)
    assert planned.num_slots == 4 and planned.slot_stride_pages == 12
    assert planned.slot_bytes == 12 * PAGE
    for cut in planned.cuts:
        assert cut.group_layers * cut.slot_pages <= 12
        assert cut.num_groups == -(-len(LAYERS) // cut.group_layers)
    cut = planned.cuts[plan.cut]
    rows = planned.rows("staged")
    assert rows.local_rows.tolist() == [[SLAB_ADDRESS, PAGE, 0, PAGE, 48]]
    assert rows.remote_rows[:, 4].tolist() == [64] * 5
    assert (rows.local_memory, rows.remote_memory) == ("vram", "vram")
    covered = []
    for number, chunk in enumerate(plan.chunks):
        layers = np.arange(chunk.num_layers)[:, None]
        pages = np.arange(chunk.num_pages)[None, :]
        local, remote = plan.descriptor_ids(number, 3)
        expected = 3 * 12 + layers * cut.slot_pages + pages
        np.testing.assert_array_equal(local, expected.ravel())
        blocks = RUNS.remote_ids[chunk.first_page : chunk.first_page + chunk.num_pages]
        expected = (chunk.first_layer + layers) * 64 + blocks[None, :]
        np.testing.assert_array_equal(remote, expected.ravel())
        covered += [
            (chunk.first_layer + layer, chunk.first_page + page)
            for layer in range(chunk.num_layers)
            for page in range(chunk.num_pages)
        ]
        group = planned.slab_regions(plan.cut, chunk.first_layer // cut.group_layers)
        assert [region.layers for region in group] == [
            (name,) for name in LAYERS[chunk.first_layer : chunk.first_layer + chunk.num_layers]
        ]
        for layer, region in enumerate(group):
            # Where the conversion looks is where the READ lands.
            at = region.block_address(3 * planned.slot_stride_pages)
            assert at == SLAB_ADDRESS + int(local.reshape(chunk.num_layers, -1)[layer, 0]) * PAGE
            assert region.format == STANDARD
    assert sorted(covered) == [(layer, page) for layer in range(5) for page in range(6)]


def test_slots_are_filled_as_suits_a_request() -> None:
    """Every layer of a short request in one chunk; few layers of a long one, its run whole.

    By hand, in units of 10 us: a chunk costs 3, a descriptor 1. In slots of 120 pages 24 pages fit
    with all 5 layers. 60 pages take 3 chunks and 15 descriptors so (24), 4 and 10 with 3 layers a
    slot (22), 5 and 5 with one (20).
    """
    link = kvpd.LinkModel(
        "vram", bytes_per_second=1e12, seconds_per_descriptor=1e-5, seconds_per_chunk=3e-5
    )
    planned = planner(480, in_place=False, link=link)
    for pages, layers, chunks in ((24, 5, 1), (60, 1, 5)):
        plan = planned.plan(kvpd.runs(range(pages), range(pages)))
        assert planned.cuts[plan.cut].group_layers == layers
        assert (len(plan.chunks), plan.num_merged_descriptors) == (chunks, 5)
        assert {chunk.num_layers for chunk in plan.chunks} == {layers}


def test_by_page_no_neighbours_are_of_one_row() -> None:
    """Where merged READs are slow: two rows and more, so nothing merges."""
    # A conversion too fast to decide the geometry: in slots of one page nothing merges anyway.
    link = kvpd.LinkModel(
        "dram",
        bytes_per_second=13e9,
        merged_bytes_per_second=1e6,
        convert_bytes_per_second=2e9,
    )
    plan = planner(64, in_place=False, link=link).plan(RUNS)
    assert plan.order == "by_page"
    assert plan.num_merged_descriptors == plan.num_descriptors == 30
    local, remote = plan.descriptor_ids(0)
    assert not ((np.diff(local) == 1) & (np.diff(remote) == 1)).any()
    by_row = planner(64, in_place=False).plan(RUNS)
    assert by_row.order == "by_row" and by_row.num_merged_descriptors < 30


def test_the_fastest_placement_that_is_allowed() -> None:
    everything = planner(64, direct=True)
    plan = everything.plan(RUNS)
    assert everything.placements == ["direct", "in_place", "staged"]
    assert (plan.placement, plan.num_descriptors, len(plan.chunks)) == ("direct", 0, 1)
    assert plan.num_bytes == 5 * 6 * PAGE and plan.num_pages == 6
    alone = [planner(64, in_place=False), planner(), planner(direct=True, in_place=False)]
    assert plan.predicted_seconds == min(one.plan(RUNS).predicted_seconds for one in alone)
    text = plan.explain()
    assert all(word in text for word in ("chosen: direct", "not: in_place", "not: staged", "ms"))
    assert "4 slots" in everything.explain() and "GB/s" in everything.explain()
    with pytest.raises(kvpd.PlanError):
        plan.descriptor_ids(0)
    empty = everything.plan(kvpd.runs([], []))
    assert (empty.chunks, empty.num_pages) == ((), 0)


def test_links() -> None:
    link = kvpd.LinkModel("vram", bytes_per_second=1e9, seconds_per_descriptor=1e-6)
    assert link.merged_bytes_per_second == link.bytes_per_second == 1e9
    assert link.best_descriptor_bytes == pytest.approx(4000)
    assert link.seconds_per_chunk == kvpd.LinkModel("vram").seconds_per_chunk
    assert link != kvpd.LinkModel("vram") == kvpd.LinkModel()
    for wrong in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(kvpd.PlanError) as error:
            kvpd.LinkModel("dram", seconds_per_chunk=wrong)
        assert (error.value.code, error.value.field) == ("rate", "seconds_per_chunk")


@pytest.mark.parametrize(
    ("slab_pages", "options", "code"),
    [
        (0, {"in_place": False}, "no-placement"),
        (8, {"num_slots": 0}, "count"),
        (8, {"max_pages": 0}, "count"),
        (8, {"max_pages": 2**40}, "count"),
        (0, {"slab": kvpd.Region(0, 1, PAGE - 1, PAGE - 1)}, "slab-too-small"),
    ],
)
def test_planners_that_cannot_be(slab_pages: int, options: dict[str, Any], code: str) -> None:
    with pytest.raises(kvpd.PlanError) as error:
        planner(slab_pages, **options)
    assert error.value.code == code


def test_what_a_plan_has_not() -> None:
    planned = planner(48, in_place=False, max_pages=6)
    plan = planned.plan(RUNS)
    for call in (
        lambda: plan.descriptor_ids(len(plan.chunks)),
        lambda: plan.descriptor_ids(0, 4),
        lambda: planned.rows("in_place"),
        lambda: planned.rows("direct"),
        lambda: planned.slab_regions(0, planned.cuts[0].num_groups),
        lambda: planned.slab_regions(len(planned.cuts), 0),
    ):
        with pytest.raises(kvpd.PlanError) as error:
            call()
        assert error.value.code == "absent"
    for local, remote, code in (
        (range(7), range(7), "too-many-pages"),
        ([64], [0], "no-such-block"),
        ([0], [64], "no-such-block"),
    ):
        with pytest.raises(kvpd.PlanError) as error:
            planned.plan(kvpd.runs(list(local), list(remote)))
        assert error.value.code == code
