"""Conversion over shapes, prefix hits, chunked prefill and placements; a pair of engines each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.checks import Colocated, assert_uses, checked_hand_over, kvpd_pair, page_shape
from tests.vllm.model import ModelShape
from tests.vllm.pair import prompts

SHAPE = ModelShape(kv_heads=2, head_dim=64)
BLOCK = 16


@pytest.mark.parametrize(
    ("shape", "block_size"),
    [
        pytest.param(ModelShape(3, 128, "float16"), 32, marks=pytest.mark.core),
        pytest.param(ModelShape(1, 64, "float16"), 32, marks=pytest.mark.slow),
        pytest.param(ModelShape(4, 128, "bfloat16"), 16, marks=pytest.mark.slow),
        pytest.param(ModelShape(2, 64, "bfloat16"), 32, marks=pytest.mark.slow),
    ],
    ids=lambda value: value.name if isinstance(value, ModelShape) else f"block{value}",
)
def test_shapes(
    shape: ModelShape,
    block_size: int,
    model_of: Callable[[ModelShape], Path],
    colocated: Colocated,
    tmp_path: Path,
) -> None:
    batch = prompts(3, blocks=3, block_size=block_size, seed=51)
    expected = colocated(shape, block_size, batch)
    common: dict[str, Any] = {"dtype": shape.dtype, "block_size": block_size}
    with kvpd_pair(model_of(shape), tmp_path, **common) as pair:
        assert_uses(pair, "StandardAttention", "ShuffledAttention", ("LBHNC", "LHBNC"))
        checked_hand_over(pair, batch, expected, page_shape(shape, block_size), tmp_path)


def test_prefix_hits_and_chunked_prefill(
    model_of: Callable[[ModelShape], Path], colocated: Colocated, tmp_path: Path
) -> None:
    """Blocks that the decoder has already are not read; a prompt may be prefilled in pieces."""
    first, other = prompts(2, blocks=4, block_size=BLOCK, seed=61)
    longer = first[: 3 * BLOCK] + other[: 2 * BLOCK + 5]
    batches = [[first], [longer], [longer[: 4 * BLOCK] + first[:7]]]
    # The whole batch exceeds one step's token budget on both engines.
    common: dict[str, Any] = {"enable_prefix_caching": True, "max_num_batched_tokens": 48}
    with kvpd_pair(model_of(SHAPE), tmp_path, **common) as pair:
        hits = []
        for batch in batches:
            expected = colocated(SHAPE, BLOCK, batch)
            result = checked_hand_over(pair, batch, expected, page_shape(SHAPE, BLOCK), tmp_path)
            hits += [result.num_hit_blocks(name) for name in result.tokens]
    assert hits == [0, 3, 4]


@pytest.mark.core
def test_staged_in_a_slab(
    model_of: Callable[[ModelShape], Path], colocated: Colocated, tmp_path: Path
) -> None:
    """The slab holds a third of a request of seven blocks; requests take turns."""
    page_bytes = 2 * SHAPE.kv_heads * BLOCK * SHAPE.head_dim * 2
    batch = prompts(4, blocks=6, block_size=BLOCK, seed=71)
    expected = colocated(SHAPE, BLOCK, batch)
    # Descriptors that cost far more than chunks: in place would need twice as many.
    link = {"seconds_per_descriptor": 1.0, "seconds_per_chunk": 1e-6}
    options = {"slab_bytes": 7 * page_bytes + 100, "link": link}
    with kvpd_pair(model_of(SHAPE), tmp_path, options, max_model_len=112) as pair:
        checked_hand_over(pair, batch, expected, page_shape(SHAPE, BLOCK), tmp_path)
        metrics = pair.decode.call("metrics")
    assert metrics["vllm:kvpd_requests_total placement=staged"] == len(batch)
    assert "vllm:kvpd_slab_use" in metrics


def test_preempted_requests(
    model_of: Callable[[ModelShape], Path], colocated: Colocated, tmp_path: Path
) -> None:
    """The decoder's cache is too small for all that it decodes; some have to start over."""
    batch = prompts(4, blocks=4, block_size=BLOCK, seed=81)
    expected = colocated(SHAPE, BLOCK, batch, max_tokens=60)
    pages = page_shape(SHAPE, BLOCK)
    with kvpd_pair(model_of(SHAPE), tmp_path, num_blocks=26, max_model_len=256) as pair:
        checked_hand_over(pair, batch, expected, pages, tmp_path, max_tokens=60)
        assert pair.decode.call("metrics")["vllm:num_preemptions_total"] > 0
        # The preempted requests' blocks went around; what comes next is right too.
        again = prompts(2, blocks=3, block_size=BLOCK, seed=82)
        checked_hand_over(pair, again, colocated(SHAPE, BLOCK, again), pages, tmp_path)
