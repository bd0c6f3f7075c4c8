"""The main job: prefill on standard pages, decode on shuffled ones, real vLLM over real NIXL."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.vllm.checks import (
    Colocated,
    assert_uses,
    checked_hand_over,
    kvpd_pair,
    page_shape,
    until,
)
from tests.vllm.model import LAYERS, ModelShape
from tests.vllm.pair import Pair, prompts

SHAPE = ModelShape(kv_heads=2, head_dim=64)
BLOCK = 16

pytestmark = pytest.mark.core


@pytest.fixture(scope="module")
def pair(
    model_of: Callable[[ModelShape], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    with kvpd_pair(model_of(SHAPE), tmp_path_factory.mktemp("pair")) as pair:
        # No environment variable chose the layouts; the decoder asked for its own.
        assert_uses(pair, "StandardAttention", "ShuffledAttention", ("LBHNC", "LHBNC"))
        yield pair


def test_tokens_and_pages_of_six_at_once(pair: Pair, colocated: Colocated, tmp_path: Path) -> None:
    batch = prompts(6, blocks=4, block_size=BLOCK)
    expected = colocated(SHAPE, BLOCK, batch)
    checked_hand_over(pair, batch, expected, page_shape(SHAPE, BLOCK), tmp_path)


def test_writes_exactly_the_blocks_of_the_request(pair: Pair, tmp_path: Path) -> None:
    requests = pair.prefill_only(prompts(1, blocks=5, block_size=BLOCK, seed=11))
    pair.decode.call("poison", seed=17)
    before = pair.decode.pages(tmp_path)
    source = pair.prefill.pages(tmp_path)
    result = pair.decode_only(requests)
    (name,) = result.tokens
    local, after = result.local_blocks[name], result.received_pages[name]
    others = [block for block in range(before.shape[1]) if block not in local]
    assert len(local) == 6
    assert np.array_equal(after[:, others], before[:, others])
    expected = page_shape(SHAPE, BLOCK).shuffle(source[:, result.remote_blocks[name]])
    assert np.array_equal(after[:, local], expected)
    assert not np.array_equal(after[:, local], before[:, local])


def test_one_after_the_other_into_reused_blocks(
    pair: Pair, colocated: Colocated, tmp_path: Path
) -> None:
    """Freed blocks come back in another order, and local and remote ids are not equal."""
    # Blocks that only the prefill holds: without them both pools may go in step.
    held = pair.prefill_only(prompts(1, blocks=2, block_size=BLOCK, seed=19))
    shuffled_ids = False
    for seed in range(20, 24):
        batch = prompts(3, blocks=seed % 3 + 1, block_size=BLOCK, seed=seed)
        expected = colocated(SHAPE, BLOCK, batch)
        result = checked_hand_over(pair, batch, expected, page_shape(SHAPE, BLOCK), tmp_path)
        shuffled_ids |= any(
            result.local_blocks[name] != result.remote_blocks[name] for name in result.tokens
        )
    assert shuffled_ids, "all ids were equal on both sides; nothing was shown"
    pair.decode_only(held)  # the prefill may let them go


def test_the_prefill_lets_go_after_one_notice(pair: Pair) -> None:
    pair.hand_over(prompts(2, blocks=2, block_size=BLOCK, seed=31))
    state = "result = dict(pending=len(engine.connector_worker()._reqs_to_send))"
    until(lambda: pair.prefill.call("evaluate", source=state)["pending"] == 0)
    assert "unrecognized request" not in pair.prefill.log
    assert "expired" not in pair.prefill.log


def test_metrics_tell_transfer_and_conversion_apart(pair: Pair) -> None:
    before = pair.decode.call("metrics")
    pair.hand_over(prompts(2, blocks=3, block_size=BLOCK, seed=41))
    after = pair.decode.call("metrics")

    def grown(name: str) -> float:
        return float(after[name] - before[name])

    page_bytes = 2 * SHAPE.kv_heads * BLOCK * SHAPE.head_dim * 2
    assert grown("vllm:kvpd_pages_converted_total") == 8
    assert grown("vllm:kvpd_bytes_converted_total") == 8 * page_bytes * LAYERS
    assert grown("vllm:kvpd_convert_seconds_count") == 2
    assert grown("vllm:kvpd_read_seconds_count") == 2
    assert grown("vllm:kvpd_convert_seconds_sum") > 0
    assert grown("vllm:kvpd_read_seconds_sum") > 0
    assert grown("vllm:nixl_num_failed_transfers_total") == 0
    # Stock's own metrics count these reads too: two of them, two half pages a block and layer.
    for name in ("xfer_time_seconds", "post_time_seconds", "bytes_transferred", "num_descriptors"):
        assert grown(f"vllm:nixl_{name}_count") == 2
    assert grown("vllm:nixl_bytes_transferred_sum") == 8 * page_bytes * LAYERS
    assert grown("vllm:nixl_num_descriptors_sum") == 8 * LAYERS * 2
    assert grown("vllm:nixl_xfer_time_seconds_sum") > 0
