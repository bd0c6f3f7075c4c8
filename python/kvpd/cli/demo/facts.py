"""What both sides of the demo say about themselves."""

from __future__ import annotations

from kvpd._kvpd import EngineFacts, __version__
from kvpd.cli.demo.scenario import Scenario


def engine_facts(scenario: Scenario, layout: str, backend: str) -> EngineFacts:
    """Facts of one side; the scenario's model is the same on both."""
    return EngineFacts(
        model="kvpd-demo",
        # There is no model: nothing about one is unknown.
        model_config={},
        model_weights="none",
        model_dtype="bfloat16",
        cache_dtype=scenario.dtype,
        total_kv_heads=scenario.heads,
        head_dim=scenario.head_dim,
        block_size=scenario.tokens,
        layout=layout,
        backend=backend,
        release=__version__,
        connector=__version__,
    )
