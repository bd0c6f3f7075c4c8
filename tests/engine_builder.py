"""Engines as the tests need them: facts, regions, descriptions."""

from __future__ import annotations

from typing import Any

from kvpd import EngineDescription, EngineFacts, PageFormat, Region
from kvpd._kvpd import cache_regions

LAYERS = ("layer.0", "layer.1", "layer.2")


def facts(**changes: Any) -> EngineFacts:
    """Facts of one rank, with what the test changes."""
    values: dict[str, Any] = {
        "model": "some/model",
        "model_config": {"hidden_size": "4096"},
        "model_weights": "weights 1",
        "model_dtype": "bfloat16",
        "cache_dtype": "bfloat16",
        "total_kv_heads": 4,
        "head_dim": 64,
        "block_size": 16,
        "layout": "LBHNC",
        "backend": "FLASH_ATTN",
        "release": "0.33.0",
        "connector": "1",
    }
    return EngineFacts(**{**values, **changes})


def page_format(kind: str = "standard", **changes: Any) -> PageFormat:
    """A page format of the shape that `facts` describes."""
    values: dict[str, Any] = {"heads": 4, "tokens": 16, "head_dim": 64, "dtype": "bfloat16"}
    format: PageFormat = getattr(PageFormat, kind)(**{**values, **changes})
    return format


def regions(
    format: PageFormat, layout: str = "LBHNC", *, layers: tuple[str, ...] = LAYERS
) -> tuple[Region, ...]:
    """A cache of eleven blocks at an arbitrary address."""
    return cache_regions(format, layout, address=1 << 40, num_blocks=11, layers=layers)


def engine(
    kind: str = "standard",
    layout: str = "LBHNC",
    *,
    layers: tuple[str, ...] = LAYERS,
    format_changes: dict[str, Any] | None = None,
    **fact_changes: Any,
) -> EngineDescription:
    """One rank of an engine."""
    format = page_format(kind, **(format_changes or {}))
    return EngineDescription(
        facts(layout=layout, **fact_changes), regions(format, layout, layers=layers)
    )
