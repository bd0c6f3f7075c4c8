"""Pure-torch attention backends for tests: one arithmetic, three ways to store a page.

All compute the same floating-point operations in the same order, so two engines that differ
only in the page format produce equal tokens. None is fast; all are easy to check:

- `StandardBackend` keeps vLLM's packed page, per block [H, N, 2*D].
- `ShuffledBackend` keeps AITER's page, per block K [H, D/x, N, x] and V [H, N/x, D, x] with
  x = 16 / element bytes, as two head slots.
- `FusedBackend` keeps the same, written by `kvpd.write`.
- `KeyedBackend` keeps pages that are no permutation of the standard ones (keyed.py), and brings
  its own converter.
- `CutBackend` is `StandardBackend` with kernels for shorter blocks than vLLM's scheduler has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheLayout

from kvpd import PageFormat
from kvpd.convert import Conversion
from kvpd.vllm.adapter.fused_writers import FusedWriters
from tests.vllm import keyed


@dataclass
class TorchMetadata:
    """Per batch: where each request's queries start, how long it is, which blocks it has."""

    query_start_loc: list[int]
    seq_lens: list[int]
    block_table: torch.Tensor  # [requests, blocks]


class TorchMetadataBuilder(AttentionMetadataBuilder[TorchMetadata]):
    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: Any,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> TorchMetadata:
        num_reqs = common_attn_metadata.num_reqs
        return TorchMetadata(
            query_start_loc=common_attn_metadata.query_start_loc[: num_reqs + 1].tolist(),
            seq_lens=common_attn_metadata.seq_lens[:num_reqs].tolist(),
            block_table=common_attn_metadata.block_table_tensor,
        )


class TorchAttention(AttentionImpl):
    """Attention over gathered K and V; subclasses say where an element lies in the cache."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        **unused: Any,
    ) -> None:
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.window = sliding_window
        self.kv_cache_dtype = kv_cache_dtype

    def block_tokens(self, kv_cache: torch.Tensor) -> int:
        return int(kv_cache.shape[2])

    def store(
        self, kv_cache: torch.Tensor, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Write K and V [T, H, D] of tokens at `slots` [T]."""
        raise NotImplementedError

    def load(
        self, kv_cache: torch.Tensor, slots: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Read K and V [T, H, D] of tokens at `slots` [T]."""
        raise NotImplementedError

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        slots = slot_mapping.to(torch.int64)
        valid = slots >= 0
        num_tokens = slots.shape[0]
        self.store(kv_cache, slots[valid], key[:num_tokens][valid], value[:num_tokens][valid])

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: TorchMetadata,
        output: torch.Tensor | None = None,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert output is not None
        if attn_metadata is None:
            return output.zero_()
        tokens = self.block_tokens(kv_cache)
        starts = attn_metadata.query_start_loc
        for row, seq_len in enumerate(attn_metadata.seq_lens):
            first, last = starts[row], starts[row + 1]
            if first == last:
                continue
            position = torch.arange(seq_len)
            blocks = attn_metadata.block_table[row].to(torch.int64)[position // tokens]
            slots = blocks * tokens + position % tokens
            keys, values = self.load(kv_cache, slots)
            out = self._attend(query[first:last], keys, values, seq_len)
            output[first:last].view(last - first, self.num_heads, self.head_size).copy_(out)
        return output

    def _attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seq_len: int
    ) -> torch.Tensor:
        group = self.num_heads // self.num_kv_heads
        num_queries = query.shape[0]
        heads = (num_queries, self.num_heads, self.head_size)
        q = query.reshape(heads).float().transpose(0, 1)
        k = keys.float().repeat_interleave(group, dim=1).transpose(0, 1)
        v = values.float().repeat_interleave(group, dim=1).transpose(0, 1)
        # One query at a time: the result must not depend on how a prompt was chunked.
        rows = []
        for index in range(num_queries):
            visible = seq_len - num_queries + index + 1
            # Blocks in front of a window are given back: cut off, since 0 times NaN is NaN.
            first = 0 if self.window is None else max(0, visible - self.window)
            scores = (k[:, first:visible] * q[:, index : index + 1]).sum(-1) * self.scale
            weights = torch.softmax(scores, dim=-1)
            rows.append((weights[:, :, None] * v[:, first:visible]).sum(1))
        return torch.stack(rows).to(query.dtype)


class StandardAttention(TorchAttention):
    """Cache [B, H, N, 2*D]."""

    def store(
        self, kv_cache: torch.Tensor, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        tokens = self.block_tokens(kv_cache)
        kv_cache[slots // tokens, :, slots % tokens, :] = torch.cat((key, value), dim=-1)

    def load(
        self, kv_cache: torch.Tensor, slots: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = self.block_tokens(kv_cache)
        both = kv_cache[slots // tokens, :, slots % tokens, :]
        return both[..., : self.head_size], both[..., self.head_size :]


class ShuffledAttention(TorchAttention):
    """Cache [B, 2, N, H*D]; each slot is one dense tile, K [H, D/x, N, x], V [H, N/x, D, x]."""

    def _views(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
        blocks, tokens = kv_cache.shape[0], kv_cache.shape[2]
        x = 16 // kv_cache.element_size()
        heads, dim = self.num_kv_heads, self.head_size
        # view(), never reshape(): a copy would swallow the writes.
        k = kv_cache[:, 0].view(blocks, heads, dim // x, tokens, x)
        v = kv_cache[:, 1].view(blocks, heads, tokens // x, dim, x)
        return k, v, x

    def store(
        self, kv_cache: torch.Tensor, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        k, v, x = self._views(kv_cache)
        tokens = self.block_tokens(kv_cache)
        block, token = slots // tokens, slots % tokens
        k[block, :, :, token, :] = key.reshape(-1, self.num_kv_heads, self.head_size // x, x)
        v[block, :, token // x, :, token % x] = value

    def load(
        self, kv_cache: torch.Tensor, slots: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        k, v, x = self._views(kv_cache)
        tokens = self.block_tokens(kv_cache)
        block, token = slots // tokens, slots % tokens
        keys = k[block, :, :, token, :].reshape(-1, self.num_kv_heads, self.head_size)
        return keys, v[block, :, token // x, :, token % x]


class KeyedAttention(StandardAttention):
    """Cache [B, H, N, 2*D]: V, then K with its bits XORed."""

    def store(
        self, kv_cache: torch.Tensor, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        super().store(kv_cache, slots, value, _xored(key))

    def load(
        self, kv_cache: torch.Tensor, slots: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        values, keys = super().load(kv_cache, slots)
        return _xored(keys), values


def _xored(elements: torch.Tensor) -> torch.Tensor:
    return (elements.contiguous().view(torch.int16) ^ keyed.KEY).view(elements.dtype)


class StandardBackend(AttentionBackend):
    """Standard pages. The name is the one that CUDA FlashAttention reports."""

    forward_includes_kv_cache_update: bool = False
    name: ClassVar[str] = "FLASH_ATTN"

    @classmethod
    def get_name(cls) -> str:
        return cls.name

    @staticmethod
    def get_impl_cls() -> type[TorchAttention]:
        return StandardAttention

    @staticmethod
    def get_builder_cls() -> type[TorchMetadataBuilder]:
        return TorchMetadataBuilder

    @classmethod
    def kvpd_page_format(
        cls, *, kv_heads: int, tokens: int, head_dim: int, dtype: str, layout: str
    ) -> PageFormat | None:
        return PageFormat.standard(
            heads=kv_heads,
            tokens=tokens,
            head_dim=head_dim,
            dtype=dtype,
            interior="NHC" if layout == "LBNHC" else "HNC",
        )

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.LBHNC, KVCacheLayout.LBNHC, KVCacheLayout.LHBNC)


class ShuffledBackend(StandardBackend):
    """Shuffled pages. The name is the same: AITER FA reports FLASH_ATTN too."""

    @staticmethod
    def get_impl_cls() -> type[TorchAttention]:
        return ShuffledAttention

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


class FusedAttention(FusedWriters, ShuffledAttention):
    """`ShuffledAttention`, its pages written by kvpd's writers."""

    kvpd_backend = ShuffledBackend


class FusedBackend(ShuffledBackend):
    """Shuffled pages that kvpd writes; answers the hooks of vLLM's graph passes."""

    @staticmethod
    def get_impl_cls() -> type[TorchAttention]:
        return FusedAttention


class KeyedBackend(StandardBackend):
    """Pages of its own, and the converter that makes them of standard ones."""

    @staticmethod
    def get_impl_cls() -> type[TorchAttention]:
        return KeyedAttention

    @classmethod
    def kvpd_page_format(
        cls, *, kv_heads: int, tokens: int, head_dim: int, dtype: str, layout: str
    ) -> PageFormat | None:
        return keyed.keyed_format(heads=kv_heads, tokens=tokens, head_dim=head_dim, dtype=dtype)

    @classmethod
    def kvpd_converters(cls, target: PageFormat) -> Sequence[tuple[PageFormat, type[Conversion]]]:
        return keyed.converters(target)

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.LBHNC,)


class CutBackend(StandardBackend):
    """Standard pages, with kernels for blocks of 16 tokens only: vLLM cuts longer ones."""

    @staticmethod
    def get_supported_kernel_block_sizes(
        kv_cache_spec: object | None = None,
    ) -> list[int | MultipleOf]:
        return [16]


BACKENDS: dict[str, type[AttentionBackend]] = {
    "standard": StandardBackend,
    "shuffled": ShuffledBackend,
    "fused": FusedBackend,
    "keyed": KeyedBackend,
    "cut": CutBackend,
}
