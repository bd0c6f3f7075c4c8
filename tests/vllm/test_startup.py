"""What an engine refuses to start with, and says so in one line that names the key."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.client import EngineError, EngineOptions, EngineProcess
from tests.vllm.model import ModelShape
from tests.vllm.pair import kvpd_transfer

SHAPE = ModelShape(kv_heads=2, head_dim=64)
PERMUTES = "enable_permute_local_kv is True; kvpd needs false"
CONVERTS = {"page_format_conversion": True}
# A model of full and sliding-window layers, of the same sizes.
HYBRID = {
    "load_format": "dummy",
    "hf_overrides": {
        "architectures": ["LlamaForCausalLM"],
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "sliding_window": 64,
    },
}


@pytest.mark.parametrize(
    ("backend", "extra", "message"),
    [
        (
            "shuffled",
            {"page_format_conversion": "yes"},
            "page_format_conversion is 'yes'; expected true",
        ),
        ("shuffled", {"slab_bytes": 8191, "page_format_conversion": True}, "give it at least 8192"),
        # Stock would permute shuffled pages as if they were [H, N, C], and once one peer of another
        # layout was there, the pages of every peer.
        ("shuffled", {"enable_permute_local_kv": True}, PERMUTES),
        ("standard", {"enable_permute_local_kv": True}, PERMUTES),
    ],
)
def test_refused_at_startup(
    backend: str,
    extra: dict[str, Any],
    message: str,
    model_of: Callable[[ModelShape], Path],
    tmp_path: Path,
) -> None:
    options = EngineOptions(
        model_of(SHAPE), backend, transfer=kvpd_transfer("kv_consumer", **extra)
    )
    assert message in why_refused(options, tmp_path)


def why_refused(options: EngineOptions, directory: Path) -> str:
    with (
        EngineProcess("decode", options, directory) as engine,
        pytest.raises(EngineError) as caught,
    ):
        _ = engine.facts
    return str(caught.value)


@pytest.mark.parametrize("backend", ["standard", "shuffled"])
def test_what_is_read_back_is_not_converted(
    backend: str, model_of: Callable[[ModelShape], Path], tmp_path: Path
) -> None:
    """In the second turn the prefill reads: no key could make those requests work."""
    transfer = kvpd_transfer("kv_both", bidirectional_kv_xfer=True, **CONVERTS)
    said = why_refused(EngineOptions(model_of(SHAPE), backend, transfer=transfer), tmp_path)
    assert "page_format_conversion and bidirectional_kv_xfer are both on" in said


def test_a_forced_layout_that_cannot_be_converted_into(
    model_of: Callable[[ModelShape], Path], tmp_path: Path
) -> None:
    options = EngineOptions(
        model_of(SHAPE),
        "shuffled",
        transfer=kvpd_transfer("kv_consumer", **CONVERTS),
        environment={"VLLM_KV_CACHE_LAYOUT": "LBHNC"},
    )
    said = why_refused(options, tmp_path)
    assert "VLLM_KV_CACHE_LAYOUT is LBHNC, and page_format_conversion can only write" in said
    assert "leave VLLM_KV_CACHE_LAYOUT unset, LHBNC is chosen then" in said


def test_a_hybrid_model_names_the_switch_that_works(
    model_of: Callable[[ModelShape], Path], tmp_path: Path
) -> None:
    options = EngineOptions(
        model_of(SHAPE),
        "shuffled",
        transfer=kvpd_transfer("kv_consumer", **CONVERTS),
        llm_args=HYBRID,
        max_model_len=256,  # every group takes blocks of its own
    )
    said = why_refused(options, tmp_path)
    listed = r"here are \d KV cache groups: layers model\.layers\.0\.self_attn\.attn.* keep \w+"
    assert re.search(listed, said) and "--disable-hybrid-kv-cache-manager" in said
    works = HYBRID | {"disable_hybrid_kv_cache_manager": True}
    with EngineProcess("works", replace(options, llm_args=works), tmp_path) as engine:
        assert engine.facts["implementations"] == ["ShuffledAttention"]
