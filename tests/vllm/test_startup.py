"""What an engine refuses to start with, and says so in one line that names the key."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.client import EngineError, EngineOptions, EngineProcess
from tests.vllm.model import ModelShape
from tests.vllm.pair import kvpd_transfer

SHAPE = ModelShape(kv_heads=2, head_dim=64)
PERMUTES = "enable_permute_local_kv is True; kvpd needs false"


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
    engine = EngineProcess("decode", options, tmp_path)
    with engine, pytest.raises(EngineError) as caught:
        _ = engine.facts
    assert message in str(caught.value)
