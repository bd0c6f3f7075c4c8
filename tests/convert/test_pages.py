"""Pages are views of the regions' own bytes, or an error."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvpd import ConversionError, PageFormat, Region
from kvpd._kvpd import PlaneSpan, cache_regions
from kvpd.convert import Pages

SHAPE: dict[str, Any] = {"heads": 2, "tokens": 16, "head_dim": 64, "dtype": "bfloat16"}
STANDARD = PageFormat.standard(**SHAPE)
SHUFFLED = PageFormat.aiter_shuffle(**SHAPE)
PAGE = STANDARD.page_bytes
LAYERS = ("a", "b", "c")


def memory_for(num_bytes: int) -> torch.Tensor:
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8)


HEADS_FIRST = ["LBHNC", "LHBNC", "BLHNC", "BHLNC"]
TOKENS_FIRST = PageFormat.standard(**SHAPE, interior="NHC")


@pytest.mark.parametrize(
    "format, layout",
    [
        *((format, layout) for format in (STANDARD, SHUFFLED) for layout in HEADS_FIRST),
        (TOKENS_FIRST, "LBNHC"),
        (TOKENS_FIRST, "BLNHC"),
    ],
    ids=str,
)
def test_every_layout(format: PageFormat, layout: str) -> None:
    """Page bytes seen through the pieces are those of the region table, for every block."""
    memory = memory_for(len(LAYERS) * 5 * PAGE)
    base = memory.data_ptr()
    regions = cache_regions(format, layout, address=base, num_blocks=5, layers=LAYERS)
    pages = Pages.of(format, regions, [memory_for(10), memory])
    assert (pages.num_layers, pages.num_blocks) == (3, 5)
    starts = np.cumsum([0, *format.plane_bytes])
    image = memory.numpy()
    for layer, name in enumerate(LAYERS):
        for block in range(5):
            expected = np.zeros(PAGE, dtype=np.uint8)
            for region in regions:
                if name in region.layers:
                    at = region.block_address(block) - base
                    for span in region.planes:
                        start = starts[span.plane] + span.start_bytes
                        expected[start : start + span.num_bytes] = image[at : at + span.num_bytes]
                        at += span.num_bytes
            seen = torch.cat([piece[block] for piece in pages.layers[layer]])
            assert np.array_equal(seen.numpy(), expected)


def test_pieces_are_views_of_the_storage_and_not_copies() -> None:
    memory = torch.zeros(3, PAGE, dtype=torch.uint8)
    region = Region(memory.data_ptr(), 3, PAGE, PAGE, format=SHUFFLED, planes=[0, 1], layers=["a"])
    pages = Pages.of(SHUFFLED, [region], [memory.view(torch.bfloat16).view(3, 2, 16, 128)])
    pages.layers[0][1][2] = 7
    assert (memory[2, PAGE // 2 :] == 7).all() and memory.sum() == 7 * (PAGE // 2)


def test_layers_in_order_of_appearance_and_fewest_blocks_count() -> None:
    memory = memory_for(20 * PAGE)
    base = memory.data_ptr()
    half = PAGE // 2
    regions = [
        Region(base, 4, half, half, format=SHUFFLED, planes=[1], layers=["z"]),
        Region(base + 4 * PAGE, 6, half, half, format=SHUFFLED, planes=[0], layers=["z"]),
        Region(base + 10 * PAGE, 5, PAGE, PAGE, format=SHUFFLED, planes=[0, 1], layers=["a", "y"]),
    ]
    pages = Pages.of(SHUFFLED, regions, [memory])
    first = [[piece.data_ptr() - base for piece in pieces] for pieces in pages.layers]
    assert first == [[4 * PAGE, 0], [10 * PAGE, 10 * PAGE + half]]
    assert pages.num_blocks == 4


def region(address: int, **changes: Any) -> Region:
    values: dict[str, Any] = {"format": SHUFFLED, "planes": [0, 1], "layers": ["a"], **changes}
    length = values.pop("length", PAGE)
    return Region(address, values.pop("num_blocks", 2), length, length, **values)


MEMORY = memory_for(8 * PAGE)
BASE = MEMORY.data_ptr()


@pytest.mark.parametrize(
    "regions, code",
    [
        ([region(BASE, format=None, planes=None)], "region-format"),
        ([region(BASE, format=STANDARD, planes=[0])], "region-format"),
        ([region(BASE + 7 * PAGE)], "outside-storage"),
        ([region(BASE - 1)], "outside-storage"),
        ([region(BASE, planes=[0], length=PAGE // 2)], "layer-cover"),
        ([region(BASE, planes=[1], length=PAGE // 2)], "layer-cover"),
        ([region(BASE), region(BASE + 4 * PAGE)], "layer-cover"),
        ([], "no-layers"),
    ],
)
def test_regions_that_are_no_pages(regions: list[Region], code: str) -> None:
    with pytest.raises(ConversionError) as caught:
        Pages.of(SHUFFLED, regions, [MEMORY])
    assert caught.value.code == code


@pytest.mark.parametrize(
    "piece, code",
    [
        (torch.zeros((2, PAGE), dtype=torch.int8), "piece-dtype"),
        (torch.zeros(PAGE, dtype=torch.uint8), "piece-rank"),
        (torch.zeros((2, PAGE), dtype=torch.uint8, device="meta"), "piece-device"),
        (torch.zeros((PAGE, 2), dtype=torch.uint8).T, "piece-strides"),
        (torch.zeros(PAGE, dtype=torch.uint8).expand(2, PAGE), "piece-strides"),
        (torch.zeros((2, PAGE + 1), dtype=torch.uint8), "page-bytes"),
    ],
)
def test_pieces_that_are_no_views_of_pages(piece: torch.Tensor, code: str) -> None:
    good = torch.zeros((2, PAGE), dtype=torch.uint8)
    with pytest.raises(ConversionError) as caught:
        Pages(SHUFFLED, ((good,), (piece,)))
    assert caught.value.code == code


def test_seen_as_a_format_of_another_length() -> None:
    pages = Pages(SHUFFLED, ((torch.zeros((2, PAGE), dtype=torch.uint8),),))
    other = PageFormat.standard(**{**SHAPE, "tokens": 32})
    with pytest.raises(ConversionError) as caught:
        pages.seen_as(other)
    assert (caught.value.code, caught.value.got) == ("page-bytes", str(PAGE))


def test_planes_cut_in_the_middle() -> None:
    """A region may hold any span of a plane."""
    memory = memory_for(4 * PAGE)
    quarter = PAGE // 4
    regions = [
        Region(
            memory.data_ptr() + number * PAGE,
            1,
            quarter,
            quarter,
            format=SHUFFLED,
            planes=[PlaneSpan(number // 2, number % 2 * quarter, quarter)],
            layers=["a"],
        )
        for number in (3, 1, 0, 2)
    ]
    pages = Pages.of(SHUFFLED, regions, [memory])
    offsets = [piece.data_ptr() - memory.data_ptr() for piece in pages.layers[0]]
    assert offsets == [0, PAGE, 2 * PAGE, 3 * PAGE]
