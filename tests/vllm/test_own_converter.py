"""A backend of its own pages, which are no permutation of standard ones, and its own converter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.vllm.checks import Colocated, assert_uses, checked_hand_over, kvpd_pair, page_shape
from tests.vllm.model import ModelShape
from tests.vllm.oracle import PageShape
from tests.vllm.pair import prompts

SHAPE = ModelShape(kv_heads=2, head_dim=64)
BLOCK = 16


@pytest.mark.core
def test_the_backends_converter_serves_its_pair(
    model_of: Callable[[ModelShape], Path], colocated: Colocated, tmp_path: Path
) -> None:
    batch = prompts(3, blocks=3, block_size=BLOCK, seed=91)
    expected = colocated(SHAPE, BLOCK, batch)
    with kvpd_pair(model_of(SHAPE), tmp_path, decode_backend="keyed") as pair:
        assert_uses(pair, "StandardAttention", "KeyedAttention", ("LBHNC", "LBHNC"))
        checked_hand_over(
            pair, batch, expected, page_shape(SHAPE, BLOCK), tmp_path, oracle=PageShape.keyed
        )


def test_refused_without_the_operators_key(
    model_of: Callable[[ModelShape], Path], tmp_path: Path
) -> None:
    off = {"page_format_conversion": False}
    with kvpd_pair(model_of(SHAPE), tmp_path, off, decode_backend="keyed") as pair:
        result = pair.hand_over(prompts(1, blocks=3, block_size=BLOCK, seed=92))
        assert set(result.finish_reasons.values()) == {"error"}
        assert "conversion-disabled: " in pair.decode.log
