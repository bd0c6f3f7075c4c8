"""One model under two names is served; two models under one name are not."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.vllm.checks import Colocated
from tests.vllm.client import EngineOptions, EngineProcess
from tests.vllm.model import ModelShape, build_model
from tests.vllm.pair import decode, kvpd_transfer, prefill, prompts, stock_transfer

SHAPE = ModelShape(kv_heads=2, head_dim=64)
BLOCK = 16


@pytest.mark.core
def test_what_was_loaded_decides_and_not_what_it_is_called(
    tmp_path: Path, colocated: Colocated
) -> None:
    """A prefill, then a rolling update of the files at its path, then decoders."""
    batch = prompts(2, blocks=3, block_size=BLOCK, seed=7)
    expected = colocated(SHAPE, BLOCK, batch)
    path = build_model(tmp_path / "models", SHAPE)
    # The same tensors in other files, elsewhere.
    same = build_model(tmp_path / "mirror", SHAPE, num_files=2)
    other = build_model(tmp_path / "next revision", SHAPE, seed=1)
    owner = EngineOptions(path, "standard", transfer=kvpd_transfer("kv_producer"))

    def reader(model: Path, **extra: bool) -> EngineOptions:
        return EngineOptions(model, "standard", transfer=kvpd_transfer("kv_consumer", **extra))

    with EngineProcess("prefill", owner, tmp_path) as source:
        assert source.facts["connector"] is not None
        with EngineProcess("mirror", reader(same), tmp_path) as target:
            assert list(decode(target, prefill(source, batch), tmp_path).tokens.values()) == (
                expected
            )
            assert "model-unproved" not in target.log
        shutil.copytree(other, path, dirs_exist_ok=True)
        with EngineProcess("updated", reader(path), tmp_path) as target:
            result = decode(target, prefill(source, batch), tmp_path)
            assert set(result.finish_reasons.values()) == {"error"}
            assert "model-weights: model_weights is " in target.log
            key = "vllm:kvpd_refusals_total reason=model-weights"
            assert target.call("metrics")[key] > 0
        with EngineProcess("allowed", reader(path, allow_other_weights=True), tmp_path) as target:
            result = decode(target, prefill(source, batch), tmp_path)
            # Served, and wrong, as the operator said it may be.
            assert set(result.finish_reasons.values()) == {"length"}
            assert list(result.tokens.values()) != expected
            assert "model-weights: load one revision" in target.log


@pytest.mark.slow
def test_stock_serves_other_weights_under_one_name(tmp_path: Path, colocated: Colocated) -> None:
    """What the test above is about, seen to be wrong."""
    batch = prompts(2, blocks=3, block_size=BLOCK, seed=7)
    expected = colocated(SHAPE, BLOCK, batch)
    path = build_model(tmp_path / "models", SHAPE)
    other = build_model(tmp_path / "next revision", SHAPE, seed=1)
    owner = EngineOptions(path, "standard", transfer=stock_transfer("kv_producer"))
    reader = EngineOptions(path, "standard", transfer=stock_transfer("kv_consumer"))
    with EngineProcess("prefill", owner, tmp_path) as source:
        assert source.facts["connector"] is not None
        shutil.copytree(other, path, dirs_exist_ok=True)
        with EngineProcess("updated", reader, tmp_path) as target:
            result = decode(target, prefill(source, batch), tmp_path)
            assert set(result.finish_reasons.values()) == {"length"}
            assert list(result.tokens.values()) != expected
