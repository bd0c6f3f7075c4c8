"""Which page formats the geometry of an untagged engine fits."""

from __future__ import annotations

import msgspec
import pytest

from kvpd.cli.inspect.fits import fits
from kvpd.vllm.published import StockMetadata
from tests.fake_side_channel import stock_fields


def geometry(layout: str, lengths: list[int], num_layers: int) -> StockMetadata:
    """Layers whose regions have these lengths, dense, block size 16."""
    fields = stock_fields(
        kv_cache_layout=layout,
        block_lens=lengths * num_layers,
        block_strides=lengths * num_layers,
        kv_caches_base_addr=list(range(len(lengths) * num_layers)),
        region_names=[f"layer.{layer}" for layer in range(num_layers) for _ in lengths],
        region_num_blocks=None,
        region_group_ids=None,
        region_mem_types=None,
    )
    return msgspec.convert(
        {k: fields[k] for k in StockMetadata.__struct_fields__ if k in fields}, StockMetadata
    )


def fitting(metadata: StockMetadata, bits: int) -> dict[str, set[tuple[int, int]]]:
    found: dict[str, set[tuple[int, int]]] = {}
    for fit in fits(metadata):
        for name in fit.formats if fit.element_bits == bits else ():
            found.setdefault(name, set()).update(fit.shapes)
    return found


@pytest.mark.parametrize("heads", [1, 2, 8])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_fits_in_lbhnc(heads: int, head_dim: int) -> None:
    """One region a layer, of K and V of all heads: every HNC format of these sizes."""
    found = fitting(geometry("LBHNC", [heads * 16 * 2 * head_dim * 2], 3), 16)
    for name in ("standard", "split-kv", "aiter-shuffle"):
        assert (heads, head_dim) in found[name]
        assert all(h * d == heads * head_dim for h, d in found[name])
    # Token-major pages lie in token-major layouts.
    assert "standard-nhc" not in found


@pytest.mark.parametrize("heads", [2, 4])
def test_fits_in_lhbnc(heads: int) -> None:
    """One region a head of standard pages, a K and a V region of shuffled ones."""
    standard = geometry("LHBNC", [16 * 2 * 64 * 2] * heads, 3)
    assert (heads, 64) in fitting(standard, 16)["standard"]
    # Two heads make two regions of the length of two planes: they cannot be told apart.
    assert ("aiter-shuffle" in fitting(standard, 16)) is (heads == 2)
    shuffled = geometry("LHBNC", [heads * 16 * 64 * 2] * 2, 3)
    assert (heads, 64) in fitting(shuffled, 16)["aiter-shuffle"]
    assert (heads, 64) not in fitting(shuffled, 16).get("standard", set()) or heads == 2


def test_fits_where_blocks_of_all_layers_lie_together() -> None:
    """BLHNC: a block of one layer is followed by the next layer's, so the stride is the sum."""
    page_bytes = 4 * 16 * 2 * 64 * 2
    dense = geometry("BLHNC", [page_bytes], 3)
    assert fits(dense) == []
    apart = msgspec.structs.replace(dense, block_strides=[3 * page_bytes] * 3)
    assert (4, 64) in fitting(apart, 16)["standard"]
    padded = msgspec.structs.replace(dense, kv_cache_layout="LBHNC", block_strides=[20_480] * 3)
    assert fits(padded) == []


@pytest.mark.parametrize(
    "metadata",
    [
        geometry("LBHNC", [1000], 3),
        geometry("a new layout", [16_384], 3),
        geometry("LBHNC", [1 << 40], 3),
        geometry("LBHNC", [0], 3),
        geometry("LBHNC", [16_384, 100], 3),
    ],
    ids=["length", "layout", "huge", "zero", "uneven"],
)
def test_nothing_fits(metadata: StockMetadata) -> None:
    assert fits(metadata) == []
