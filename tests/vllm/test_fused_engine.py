"""Engines whose pages kvpd's writers write: tokens of the backend's own, eager and compiled.

On CPUs vLLM compiles a model and runs none of its fusion passes; what is asked for of them here
must not change a token. Where they do something is a GPU: tests/gpu/fused.py.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.client import EngineOptions, EngineProcess
from tests.vllm.model import ModelShape, build_model

PROMPTS = [list(range(3, 60)), list(range(100, 117))]
BACKENDS = {"shuffled": "ShuffledAttention", "fused": "FusedAttention"}


def tokens(directory: Path, backend: str, llm_args: dict[str, Any]) -> list[list[int]]:
    options = EngineOptions(
        build_model(directory, ModelShape()),
        backend,
        dtype="bfloat16",
        block_size=16,
        num_blocks=64,
        max_model_len=256,
        max_num_batched_tokens=256,
        enable_prefix_caching=False,
        transfer=None,
        llm_args=llm_args,
    )
    with EngineProcess(backend, options, directory) as engine:
        assert engine.facts["implementations"] == [BACKENDS[backend]]
        requests = [
            {"id": str(number), "prompt": prompt, "max_tokens": 12}
            for number, prompt in enumerate(PROMPTS)
        ]
        done = engine.run(requests)
        return [done[str(number)]["tokens"] for number in range(len(PROMPTS))]


def test_eager(tmp_path: Path) -> None:
    assert tokens(tmp_path, "fused", {}) == tokens(tmp_path, "shuffled", {})


@pytest.mark.slow
def test_compiled_with_every_fusion_asked_for(tmp_path: Path) -> None:
    from vllm.config.compilation import PassConfig

    flags = [
        field.name for field in fields(PassConfig) if field.name.startswith(("fuse_", "enable_"))
    ]
    assert "fuse_norm_quant" in flags and "fuse_rope_kvcache" in flags
    compiled = {
        "enforce_eager": False,
        "compilation_config": {"mode": 3, "pass_config": dict.fromkeys(flags, True)},
    }
    assert tokens(tmp_path, "fused", compiled) == tokens(tmp_path, "shuffled", {})
