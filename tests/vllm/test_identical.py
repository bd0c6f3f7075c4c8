"""Equal page formats take stock's path: the decoder asks the same things of NIXL, call for call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.checks import Colocated
from tests.vllm.model import ModelShape
from tests.vllm.pair import Pair, kvpd_transfer, pair_options, prompts, stock_transfer

SHAPE = ModelShape(kv_heads=2, head_dim=64)


def calls_of_decoder(
    model: Path,
    directory: Path,
    backend: str,
    transfer: Callable[..., dict[str, Any]],
    layout: str,
    **decode: Any,
) -> tuple[list[Any], list[list[int]]]:
    """What the decoder asked of NIXL, and the tokens, for three requests one after the other."""
    prefill_options, decode_options = pair_options(
        model, backend, backend, transfer("kv_producer"), transfer("kv_consumer", **decode)
    )
    environment = {"VLLM_KV_CACHE_LAYOUT": layout}
    options = (
        replace(prefill_options, environment=environment),
        replace(decode_options, environment=environment, record_nixl=True),
    )
    tokens = []
    with Pair(*options, directory) as pair:
        for prompt in prompts(3, blocks=3, block_size=16, seed=7):
            tokens += list(pair.hand_over([prompt]).tokens.values())
        source = "result = engine.connector_worker().nixl_wrapper.calls"
        calls = pair.decode.call("evaluate", source=source)
    return calls, tokens


@pytest.mark.parametrize(
    ("backend", "layout"),
    [
        pytest.param("standard", "LBHNC", marks=pytest.mark.core),
        ("shuffled", "LHBNC"),
    ],
)
def test_nixl_calls_equal_stock(
    backend: str,
    layout: str,
    model_of: Callable[[ModelShape], Path],
    colocated: Colocated,
    tmp_path: Path,
) -> None:
    expected = colocated(SHAPE, 16, prompts(3, blocks=3, block_size=16, seed=7))
    model = model_of(SHAPE)
    stock, tokens = calls_of_decoder(model, tmp_path, backend, stock_transfer, layout)
    assert tokens == expected
    ours, tokens = calls_of_decoder(
        model, tmp_path, backend, kvpd_transfer, layout, page_format_conversion=True
    )
    assert tokens == expected
    assert [call[0] for call in ours] == [call[0] for call in stock]
    assert ours == stock
    reads = [call for call in stock if call[0] == "make_prepped_xfer"]
    assert len(reads) == 3, "the recorder saw no reads; nothing was compared"
