"""What vLLM's own connector does with two page formats. These tests describe the defect.

"Red" here means: the stock connector completes the hand-over, says nothing, and the tokens are
wrong. Were one of these pairs to come out right, kvpd would not be needed for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.vllm.checks import Colocated, warnings_about_pages
from tests.vllm.client import EngineOptions, EngineProcess
from tests.vllm.model import ModelShape
from tests.vllm.oracle import PageShape
from tests.vllm.pair import Pair, pair_options, prompts, stock_transfer

IMPLEMENTATION = {"standard": "StandardAttention", "shuffled": "ShuffledAttention"}
SHAPE = ModelShape(kv_heads=2, head_dim=64)


def stock_pair(
    model: Path, prefill: str, decode: str, directory: Path, layout: str | None = None
) -> Pair:
    options = pair_options(
        model, prefill, decode, stock_transfer("kv_producer"), stock_transfer("kv_consumer")
    )
    if layout is not None:
        options = tuple(  # type: ignore[assignment]
            replace(side, environment={"VLLM_KV_CACHE_LAYOUT": layout}) for side in options
        )
    return Pair(*options, directory)


@pytest.mark.parametrize(
    ("prefill", "decode", "layout"),
    [
        pytest.param("standard", "shuffled", None, marks=pytest.mark.core),
        ("shuffled", "standard", None),
        # Two heads a rank: two head regions here, a K and a V plane there, equal lengths.
        pytest.param("standard", "shuffled", "LHBNC", marks=pytest.mark.slow),
    ],
)
def test_stock_serves_wrong_tokens_without_a_word(
    prefill: str,
    decode: str,
    layout: str | None,
    model_of: Callable[[ModelShape], Path],
    colocated: Colocated,
    tmp_path: Path,
) -> None:
    batch = prompts(4, blocks=4, block_size=16)
    expected = colocated(SHAPE, 16, batch)
    with stock_pair(model_of(SHAPE), prefill, decode, tmp_path, layout) as pair:
        for side, backend in ((pair.prefill, prefill), (pair.decode, decode)):
            assert side.facts["implementations"] == [IMPLEMENTATION[backend]]
            assert side.facts["connector"].startswith("vllm.")
            assert side.facts["layout"] == (layout or "LBHNC")
        already_said = len(pair.decode.log)
        result = pair.hand_over(batch)
        assert set(result.finish_reasons.values()) == {"length"}
        wrong = [
            got for got, right in zip(result.tokens.values(), expected, strict=True) if got != right
        ]
        assert len(wrong) == len(batch), (list(result.tokens.values()), expected)
        assert warnings_about_pages(pair.decode.log[already_said:]) == []
        # The cause: the peer's bytes were copied as they are.
        source = pair.prefill.pages(tmp_path)
        for name, local in result.local_blocks.items():
            assert np.array_equal(
                result.received_pages[name][:, local], source[:, result.remote_blocks[name]]
            )


@pytest.mark.core
def test_stock_is_right_when_formats_are_equal(
    model_of: Callable[[ModelShape], Path], colocated: Colocated, tmp_path: Path
) -> None:
    """The control: same bed, equal formats. Without it the others could be red for any reason."""
    batch = prompts(4, blocks=4, block_size=16)
    expected = colocated(SHAPE, 16, batch)
    with stock_pair(model_of(SHAPE), "standard", "standard", tmp_path) as pair:
        result = pair.hand_over(batch)
    assert list(result.tokens.values()) == expected


def test_reference_is_the_conversion_that_is_missing(
    model_of: Callable[[ModelShape], Path], tmp_path: Path
) -> None:
    """Standard and shuffled caches of one prompt differ by exactly the oracle's permutation."""
    batch = prompts(2, blocks=3, block_size=16, seed=5)
    requests = [{"id": f"r{i}", "prompt": p, "max_tokens": 1} for i, p in enumerate(batch)]
    pages = {}
    engines = {
        name: EngineProcess(name, EngineOptions(model_of(SHAPE), name), tmp_path)
        for name in ("standard", "shuffled")
    }
    for name, engine in engines.items():
        with engine:
            engine.call("poison", seed=3)
            engine.run(requests)
            pages[name] = engine.pages(tmp_path)
    shape = PageShape(SHAPE.kv_heads, 16, SHAPE.head_dim, SHAPE.dtype)
    full = [1, 2, 3, 5, 6, 7]  # block 0 is vLLM's null block; 4 and 8 are partly filled
    assert np.array_equal(shape.shuffle(pages["standard"][:, full]), pages["shuffled"][:, full])
