"""An attention backend's cache writes by kvpd's kernels, RoPE and QK norm fused in.

vLLM's graph passes ask a layer's implementation whether it fuses, and call it instead of the
separate kernels if so. `FusedWriters` is mixed in front of an implementation and answers for any
pages that the backend declares. Same methods in vLLM 0.30 to 0.33.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.platforms import current_platform

from kvpd._kvpd import PageFormat
from kvpd.vllm.adapter.description import _is_shuffled
from kvpd.vllm.cache_pages import interior_layout, pages_of
from kvpd.vllm.formats import LayerCache, declared_format
from kvpd.write import Norm, Rotation, Scales, Writer, prepare

# Caches of the model's own type, and of 8-bit floats with a scale per tensor.
_PLAIN_CACHE = ("auto",)
_FP8_CACHES = ("fp8", "fp8_e4m3")


class FusedWriters:
    """Mixed in before an `AttentionImpl` whose backend declares its pages.

    MRoPE is not answered: that hook returns no rotated K, and an implementation that attends to a
    prompt's own K and V, as AITER FA does, would attend to K as it was.
    """

    kvpd_backend: ClassVar[Any]
    """The backend whose pages these are."""

    # Of the implementation.
    num_heads: int
    num_kv_heads: int
    head_size: int
    kv_cache_dtype: str

    def kvpd_writes(self) -> bool:
        """Whether kvpd writes this layer's pages; otherwise the implementation does, as ever."""
        known = self.kv_cache_dtype in _PLAIN_CACHE + _FP8_CACHES
        return known and self._kvpd_format(16, "LBHNC", "bfloat16") is not None

    def fused_rope_kvcache_supported(self) -> bool:
        """RoPE and the write in one kernel."""
        if self.kvpd_writes():
            return True
        return bool(super().fused_rope_kvcache_supported())  # type: ignore[misc]

    def fused_qk_norm_rope_kvcache_supported(self) -> bool:
        """QK norm, RoPE and the write in one kernel."""
        if self.kvpd_writes():
            return True
        return bool(super().fused_qk_norm_rope_kvcache_supported())  # type: ignore[misc]

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write a batch's K and V."""
        if not self.kvpd_writes():
            super().do_kv_cache_update(  # type: ignore[misc]
                layer, key, value, kv_cache, slot_mapping
            )
            return
        write = self._kvpd_writer(kv_cache, key.dtype)
        write(key, value, slot_mapping, scales=self._kvpd_scales(layer))

    def do_rope_and_kv_cache_update(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        positions: torch.Tensor,
        cos_sin_cache: torch.Tensor,
        is_neox: bool,
        kv_cache: torch.Tensor,
        layer_slot_mapping: torch.Tensor,
    ) -> None:
        """Rotate Q and K where they lie, and write K and V."""
        if not self.kvpd_writes():
            super().do_rope_and_kv_cache_update(  # type: ignore[misc]
                layer, query, key, value, positions, cos_sin_cache, is_neox, kv_cache,
                layer_slot_mapping,
            )  # fmt: skip
            return
        self._kvpd_writer(kv_cache, key.dtype)(
            key,
            value,
            layer_slot_mapping,
            query=query,
            rotation=Rotation(positions, cos_sin_cache, is_neox),
            scales=self._kvpd_scales(layer),
        )

    def do_qk_norm_rope_kvcache_update(
        self,
        layer: Any,
        qkv: torch.Tensor,
        q_out: torch.Tensor,
        k_out: torch.Tensor,
        positions: torch.Tensor,
        q_weight: torch.Tensor,
        k_weight: torch.Tensor,
        rms_norm_eps: float,
        cos_sin_cache: torch.Tensor,
        is_neox: bool,
        kv_cache: torch.Tensor,
        layer_slot_mapping: torch.Tensor,
    ) -> None:
        """Norm and rotate Q and K into `q_out` and `k_out`, and write K and V."""
        if not self.kvpd_writes():
            super().do_qk_norm_rope_kvcache_update(  # type: ignore[misc]
                layer, qkv, q_out, k_out, positions, q_weight, k_weight, rms_norm_eps,
                cos_sin_cache, is_neox, kv_cache, layer_slot_mapping,
            )  # fmt: skip
            return
        heads = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        sizes = [number * self.head_size for number in heads]
        parts = torch.split_with_sizes(qkv, sizes, dim=-1)
        query, key, value = (
            part.view(-1, number, self.head_size) for part, number in zip(parts, heads, strict=True)
        )
        self._kvpd_writer(kv_cache, qkv.dtype)(
            key,
            value,
            layer_slot_mapping,
            query=query,
            rotation=Rotation(positions, cos_sin_cache, is_neox),
            norm=Norm(q_weight.view(-1), k_weight.view(-1), rms_norm_eps),
            query_out=q_out,
            key_out=k_out,
            scales=self._kvpd_scales(layer),
        )

    def _kvpd_writer(self, kv_cache: torch.Tensor, dtype: torch.dtype) -> Writer:
        """The writer of this layer's cache, made anew when the cache is."""
        identity = (kv_cache.data_ptr(), kv_cache.shape, kv_cache.stride(), dtype)
        known: tuple[Any, Writer] | None = self.__dict__.get("_kvpd_known")
        if known is None or known[0] != identity:
            element = dtype if self.kv_cache_dtype in _PLAIN_CACHE else current_platform.fp8_dtype()
            name = str(element).removeprefix("torch.")
            format = self._kvpd_format(kv_cache.shape[2], interior_layout(kv_cache), name)
            assert format is not None  # `kvpd_writes` was asked before
            known = self.__dict__["_kvpd_known"] = (identity, prepare(pages_of(kv_cache, format)))
        return known[1]

    def _kvpd_scales(self, layer: Any) -> Scales | None:
        if self.kv_cache_dtype in _PLAIN_CACHE:
            return None
        return Scales(layer._k_scale.view(-1), layer._v_scale.view(-1))

    def _kvpd_format(self, tokens: int, layout: str, dtype: str) -> PageFormat | None:
        is_shuffled = _is_shuffled(self.kvpd_backend)
        cache = LayerCache(
            backend=".".join(self.kvpd_backend.full_cls_name()),
            kv_heads=self.num_kv_heads,
            tokens=tokens,
            head_dim=self.head_size,
            dtype=dtype,
            layout=layout,
            page_bytes=0,
            has_plain_content=True,
            num_head_slots=2 if is_shuffled else None,
            is_shuffled=is_shuffled,
        )
        return declared_format(cache, self.kvpd_backend)
