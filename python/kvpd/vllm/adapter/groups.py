"""vLLM's KV groups, as blocks are paired by."""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvpd.vllm.pairing import Group

_POSITIONAL = (FullAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec)
# In vLLM 0.30 and 0.31: a ring of one block, of the class of windows.
_RINGS = frozenset({"KpoolTailSpec"})


def groups_of(kv_cache_config: Any) -> list[Group] | None:
    """The groups that are transferred; None if one of them keeps states.

    The blocks of a state (Mamba, rings) have no positions: they hold what is true after the last
    token.
    """
    groups = []
    for group in kv_cache_config.transfer_groups:
        spec = group.kv_cache_spec
        is_wrapped = isinstance(spec, UniformTypeKVCacheSpecs)
        layers = spec.kv_cache_specs.values() if is_wrapped else (spec,)
        if any(not isinstance(s, _POSITIONAL) or type(s).__name__ in _RINGS for s in layers):
            return None
        groups.append(
            Group(
                spec.block_size,
                # The class alone: without its hybrid manager vLLM notes a window on the spec of
                # full attention, and one in a wrapper is listed whole.
                is_window=isinstance(spec, SlidingWindowSpec),
                # vLLM cuts lists to the computed tokens by this class.
                is_ahead=not isinstance(spec, AttentionSpec),
            )
        )
    return groups
