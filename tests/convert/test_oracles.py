"""The two oracles agree with each other and with elements worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from tests.convert.slot_writer import random_tokens, write_page
from tests.oracle.pages import Spec, planes

SHAPES = [(1, 16, 64, "bfloat16"), (3, 32, 64, "float8_e4m3fn"), (2, 16, 128, "float32")]
KINDS = [
    ("standard", "HNC"),
    ("standard", "NHC"),
    ("split-kv", "HNC"),
    ("split-kv", "NHC"),
    ("aiter-shuffle", "tiled"),
    ("aiter-shuffle", "transposed"),
]


@pytest.mark.parametrize("family, variant", KINDS)
@pytest.mark.parametrize("heads, tokens, head_dim, dtype", SHAPES)
def test_oracles_agree(
    family: str, variant: str, heads: int, tokens: int, head_dim: int, dtype: str
) -> None:
    spec = Spec(family, variant, heads, tokens, head_dim, dtype)
    k, v = random_tokens(np.random.default_rng(1), spec)
    expected = np.concatenate(planes(spec, k.transpose(1, 0, 2), v.transpose(1, 0, 2)))
    assert np.array_equal(write_page(spec, k, v), expected.view(np.uint8))


@pytest.mark.parametrize(
    "heads, head_dim, at, k_moves, v_moves",
    [
        (2, 16, (1, 5, 9), (681, 425), (697, 333)),
        (8, 128, (7, 5, 9), (29961, 14505), (30089, 14413)),
    ],
)
def test_goldens(
    heads: int,
    head_dim: int,
    at: tuple[int, int, int],
    k_moves: tuple[int, int],
    v_moves: tuple[int, int],
) -> None:
    """Element offsets of a packed page and of its shuffled planes."""
    head, token, channel = at
    standard = Spec("standard", "HNC", heads, 16, head_dim, "bfloat16")
    shuffled = Spec("aiter-shuffle", "tiled", heads, 16, head_dim, "bfloat16")
    for moved, (before, after) in enumerate((k_moves, v_moves)):
        tokens = np.zeros((2, 16, heads, head_dim), dtype=np.uint16)
        tokens[moved, token, head, channel] = 0xBEEF
        page = write_page(standard, *tokens).view(np.uint16)
        plane = write_page(shuffled, *tokens).view(np.uint16).reshape(2, -1)[moved]
        assert np.nonzero(page)[0].tolist() == [before]
        assert np.nonzero(plane)[0].tolist() == [after]
        assert page[before] == plane[after] == 0xBEEF


@pytest.mark.parametrize("heads, head_dim", [(2, 16), (8, 128)])
def test_last_element_is_last_in_both_planes(heads: int, head_dim: int) -> None:
    shuffled = Spec("aiter-shuffle", "tiled", heads, 16, head_dim, "bfloat16")
    tokens = np.zeros((2, 16, heads, head_dim), dtype=np.uint16)
    tokens[:, -1, -1, -1] = 1
    written = write_page(shuffled, *tokens).view(np.uint16).reshape(2, -1)
    assert [np.nonzero(plane)[0].tolist() for plane in written] == [[heads * 16 * head_dim - 1]] * 2
