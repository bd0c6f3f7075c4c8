"""Host code and the reference against the slot-by-slot writer, for every pair of known formats."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch

from kvpd import ConversionError, PageFormat
from kvpd._kvpd import Component, Permutation, PlaneSpan
from kvpd.convert import Conversion, Pages
from kvpd.convert.host import HostConversion
from kvpd.convert.reference import ReferenceConversion
from tests.convert.caches import page_format
from tests.convert.cases import Case, check, default_matrix, full_matrix
from tests.convert.test_oracles import KINDS
from tests.oracle.pages import Spec

BOTH = pytest.mark.parametrize("kind", [HostConversion, ReferenceConversion])


@BOTH
@pytest.mark.parametrize("case", list(default_matrix()), ids=str)
def test_shapes(case: Case, kind: type[Conversion]) -> None:
    check(case, kind)


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize("case", list(full_matrix()), ids=str)
def test_matrix(case: Case, kind: type[Conversion]) -> None:
    check(case, kind)


@BOTH
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("source, target", list(permutations(KINDS, 2)))
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float16", "float32"])
def test_any_pair(
    source: tuple[str, str],
    target: tuple[str, str],
    dtype: str,
    in_place: bool,
    kind: type[Conversion],
) -> None:
    """H=3 puts the half of a page into the middle of a head."""
    specs = [Spec(*kind, heads=3, tokens=16, head_dim=32, dtype=dtype) for kind in (source, target)]
    case = Case(specs[0], specs[1], in_place, "planes", 16, torch.int32)
    if page_format(specs[0]) == page_format(specs[1]):
        # One byte elements and 16 tokens: [H, N/16, D, 16] and [H, D, 16] are one format.
        assert {dtype, *source, *target} == {"float8_e4m3fn", *KINDS[4], *KINDS[5]}
        return
    check(case, kind)


def padded_format(order: str) -> PageFormat:
    """One head, two tokens, three channels of 2 bytes and a 4-byte scale, around padding."""
    shared: dict[str, Any] = {"heads": 1, "head_stride_bytes": 0, "plane": 0, "base_bytes": 0}
    token_major = order == "token"
    values = Component(
        "k",
        dtype="float16",
        tokens=2,
        channels=3,
        token_tile=2,
        token_tile_stride_bytes=0,
        token_stride_bytes=6 if token_major else 2,
        channel_tile=3,
        channel_tile_stride_bytes=0,
        channel_stride_bytes=2 if token_major else 4,
        **shared,
    )
    scale = Component(
        "k_scale",
        dtype="float32",
        tokens=1,
        channels=1,
        token_tile=1,
        token_tile_stride_bytes=0,
        token_stride_bytes=0,
        channel_tile=1,
        channel_tile_stride_bytes=0,
        channel_stride_bytes=0,
        **{**shared, "base_bytes": 12 if token_major else 18},
    )
    padding = PlaneSpan(0, 16, 6) if token_major else PlaneSpan(0, 12, 6)
    return PageFormat.from_components(f"padded-{order}", [values, scale], [22], [padding])


@BOTH
@pytest.mark.parametrize("is_apart", [False, True])
def test_padding_is_left_alone_and_offsets_need_no_alignment(
    kind: type[Conversion], is_apart: bool
) -> None:
    memory = torch.arange(100, 100 + 2 * 22, dtype=torch.uint8).view(2, 22)
    slab = torch.arange(22, dtype=torch.uint8).view(1, 22)
    pieces: tuple[torch.Tensor, ...] = (memory,)
    raw: tuple[torch.Tensor, ...] = (slab,)
    if is_apart:
        # The first ends within an element, on either side.
        pieces = (memory[:, :5].clone(), memory[:, 5:].clone())
        raw = (slab[:, :13].clone(), slab[:, 13:].clone())
    ids = [torch.tensor([0], dtype=torch.int32), torch.tensor([1], dtype=torch.int32)]
    kind(Pages(padded_format("token"), (raw,)), Pages(padded_format("channel"), (pieces,)))(*ids)
    expected = np.arange(100, 144, dtype=np.uint8)
    # [token, channel] becomes [channel, token]; the scale moves from 12 to 18; 12..18 is padding.
    expected[22:34] = [0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11]
    expected[40:44] = [12, 13, 14, 15]
    assert torch.cat(pieces, dim=1).flatten().tolist() == expected.tolist()


@BOTH
def test_different_components_are_named(kind: type[Conversion]) -> None:
    shape: dict[str, Any] = {"heads": 2, "tokens": 16, "head_dim": 64}
    source = PageFormat.standard(**shape, dtype="float16")
    target = PageFormat.aiter_shuffle(**{**shape, "head_dim": 32}, dtype="float32")
    pages = [
        Pages(format, ((torch.zeros((2, format.page_bytes), dtype=torch.uint8),),))
        for format in (source, target)
    ]
    with pytest.raises(ConversionError) as caught:
        kind(pages[0], pages[1])
    assert caught.value.code == "components-differ"
    for difference in ("k.dtype float16 against float32", "v.channels 64 against 32"):
        assert difference in str(caught.value)


def test_the_core_checks_what_it_is_given() -> None:
    """Whoever calls it without a `Conversion` before it."""
    shape: dict[str, Any] = {"heads": 2, "tokens": 16, "head_dim": 64, "dtype": "float16"}
    formats = PageFormat.standard(**shape), PageFormat.aiter_shuffle(**shape)
    num_bytes = formats[0].page_bytes
    permutation = Permutation(*formats)
    cache, ids = np.zeros((3, num_bytes), dtype=np.uint8), np.array([0, 1])
    strided = np.zeros((3, 2 * num_bytes), dtype=np.uint8)[:, ::2]
    for source, target, target_ids in (
        ([np.ones_like(cache)], [cache], ids + 3),
        ([np.ones_like(cache)], [cache], ids - 1),
        ([np.ones((3, num_bytes + 1), dtype=np.uint8)], [cache], ids),
        ([np.ones((3, num_bytes // 2), dtype=np.uint8)] * 3, [cache], ids),
        ([strided], [cache], ids),
        ([np.ones_like(cache)], [cache[:, :-1]], ids),
        ([np.ones_like(cache)], [cache[:, :-2], np.zeros((3, 1), dtype=np.uint8)], ids),
    ):
        cache[:] = 0
        with pytest.raises(ConversionError) as caught:
            permutation.convert(source, target, ids, target_ids)
        assert caught.value.code == "id-range"
        assert not cache.any()
    with pytest.raises(ConversionError) as caught:
        Permutation(formats[0], PageFormat.standard(**{**shape, "heads": 1}))
    assert caught.value.code == "components-differ"
