"""A decoder's attention backend that keeps shuffled pages and computes as vLLM's Triton backend.

Tokens are written into shuffled pages. Before attention, the pages that the batch uses are copied
into packed scratch by one kernel, and the stock kernels run on the scratch: they see the bytes that
they would have seen, so tokens equal TRITON_ATTN's bit for bit. Works under CUDA graphs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheLayout

from kvpd import PageFormat
from kvpd.vllm.adapter.fused_writers import FusedWriters
from tests.gpu.shuffled_pages import unshuffle, write_tokens

# Layers run one after the other on one stream: all of them share the scratch of a device.
_scratch: dict[tuple[torch.device, torch.dtype, tuple[int, ...]], torch.Tensor] = {}


def _packed(cache: torch.Tensor, heads: int, head_dim: int) -> torch.Tensor:
    """Scratch [B, H, N, 2*D] for a cache of B blocks."""
    shape = (cache.shape[0], heads, cache.shape[2], 2 * head_dim)
    key = (cache.device, cache.dtype, shape)
    if key not in _scratch:
        # From a graph's own pool it would be taken back when the graph is.
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("the first batch with a cache was inside a graph capture")
        # Zeros: the stock kernel multiplies what lies past a request's end by zero.
        _scratch[key] = torch.zeros(shape, dtype=cache.dtype, device=cache.device)
    return _scratch[key]


class ShuffledTritonImpl(TritonAttentionImpl):  # type: ignore[misc]
    """Cache [B, 2, N, H*D]; each slot is one dense tile, K [H, D/x, N, x], V [H, N/x, D, x]."""

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write the batch's tokens."""
        write_tokens(key, value, kv_cache, slot_mapping)

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: TritonAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Stock attention over the batch's pages, packed."""
        pages = kv_cache
        if attn_metadata is not None:
            pages = _packed(kv_cache, self.num_kv_heads, self.head_size)
            unshuffle(kv_cache, attn_metadata.block_table, attn_metadata.seq_lens, pages)
        result: torch.Tensor = super().forward(
            layer,
            query,
            key,
            value,
            pages,
            attn_metadata,
            output,
            output_scale,
            output_block_scale,
        )
        return result


class ShuffledTritonBackend(TritonAttentionBackend):  # type: ignore[misc]
    """Shuffled pages under the stock backend's name, as AITER FA's are under FLASH_ATTN."""

    @staticmethod
    def get_impl_cls() -> type[ShuffledTritonImpl]:
        return ShuffledTritonImpl

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        element_bytes = torch.empty((), dtype=spec.dtype).element_size()
        return replace(
            spec,
            num_head_slots=2,
            state_content_bytes=spec.num_kv_heads * spec.head_size * element_bytes,
        )

    @classmethod
    def kvpd_page_format(
        cls, *, kv_heads: int, tokens: int, head_dim: int, dtype: str, layout: str
    ) -> PageFormat | None:
        return PageFormat.aiter_shuffle(
            heads=kv_heads, tokens=tokens, head_dim=head_dim, dtype=dtype
        )

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.LHBNC, KVCacheLayout.LBHNC)


class FusedShuffledTritonImpl(FusedWriters, ShuffledTritonImpl):
    """The same pages, written by kvpd's kernels."""

    kvpd_backend = ShuffledTritonBackend


class FusedShuffledTritonBackend(ShuffledTritonBackend):
    """Answers the hooks of vLLM's graph passes."""

    @staticmethod
    def get_impl_cls() -> type[FusedShuffledTritonImpl]:
        return FusedShuffledTritonImpl
