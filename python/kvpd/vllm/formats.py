"""The page format of a cache, as declared; never guessed from shapes.

Three sources, in this order:

1. the backend class itself, by a hook (see `Declares`);
2. for vLLM's own backends, the tables below, by the class's full path. Its *name* is no key: AITER
   FA and CUDA FlashAttention both call themselves FLASH_ATTN;
3. otherwise the format is opaque: it equals only itself, so equal engines still pair and nothing
   else does.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from kvpd._kvpd import Component, PageFormat, PlaneSpan
from kvpd.errors import FormatError

if TYPE_CHECKING:
    from kvpd.words import Interior

AITER_FA = "vllm.v1.attention.backends.rocm_aiter_fa.AiterFlashAttentionBackend"
AITER_UNIFIED = (
    "vllm.v1.attention.backends.rocm_aiter_unified_attn.RocmAiterUnifiedAttentionBackend"
)
# Backends whose unquantised cache is K then V per token and head, [H, N, 2*D]. Each one's own
# `do_kv_cache_update` is run on every release by tests/vllm/test_backends.py.
PACKED = frozenset(
    {
        AITER_FA,
        AITER_UNIFIED,
        "vllm.v1.attention.backends.flash_attn.FlashAttentionBackend",
        "vllm.v1.attention.backends.flashinfer.FlashInferBackend",
        "vllm.v1.attention.backends.flex_attention.FlexAttentionBackend",
        "vllm.v1.attention.backends.triton_attn.TritonAttentionBackend",
    }
)
# Layouts whose block interior is token-major.
TOKEN_MAJOR = frozenset({"LBNHC", "BLNHC"})


@dataclass(frozen=True)
class LayerCache:
    """How vLLM keeps one layer's cache on this rank.

    Attributes:
        backend: full path of the attention backend's class.
        kv_heads, tokens, head_dim: extents of K and of V in one block.
        dtype: element type, e.g. "bfloat16".
        layout: vLLM's name of the memory order, e.g. "LBHNC".
        page_bytes: bytes of one block, without padding.
        has_plain_content: K and V of `head_dim` each, unquantised, uncompressed, without padding.
        num_head_slots: slots that the backend publishes in place of one per head; None if none.
        is_shuffled: AITER's switch for shuffled pages is on, and the backend heeds it.
        identity: everything else that could move a byte; only compared.
    """

    backend: str
    kv_heads: int
    tokens: int
    head_dim: int
    dtype: str
    layout: str
    page_bytes: int
    has_plain_content: bool
    num_head_slots: int | None = None
    is_shuffled: bool = False
    identity: str = ""

    @property
    def interior(self) -> Interior:
        """Order of heads and tokens inside a block."""
        return "NHC" if self.layout in TOKEN_MAJOR else "HNC"


@runtime_checkable
class Declares(Protocol):
    """What an attention backend outside vLLM defines, as a class method, to declare its pages."""

    def kvpd_page_format(
        self, *, kv_heads: int, tokens: int, head_dim: int, dtype: str, layout: str
    ) -> PageFormat | None:
        """The format of one block of one layer on one rank; None to have it taken as opaque."""


def page_format(cache: LayerCache, backend: object) -> PageFormat:
    """The format of a layer's pages.

    Args:
        cache: the layer.
        backend: its attention backend's class.

    Raises:
        FormatError: the backend declares a format that does not fill the page vLLM allocated.
    """
    declared = declared_format(cache, backend)
    if declared is None or why_opaque(cache, backend):
        return opaque(cache)
    if declared.page_bytes != cache.page_bytes:
        raise FormatError(
            f"{cache.backend} declares pages of {declared.page_bytes} bytes, "
            f"vLLM allocated {cache.page_bytes}",
            code="declared-page-bytes",
            field="kvpd_page_format",
            got=declared.page_bytes,
            expected=cache.page_bytes,
        )
    return declared


def why_opaque(cache: LayerCache, backend: object) -> str:
    """What keeps a layer's pages from having a known format; empty where they have one.

    "hook": the backend's own hook declares none. "backend": no table has the backend. "content":
    quantised, compressed, padded, or something other than K and V of one length. "slots": the
    backend publishes slots that the tables do not know. "layout": planes that the memory order
    interleaves token by token.
    """
    declared = declared_format(cache, backend)
    if declared is not None:
        # Such a layout interleaves the slots token by token: the planes are not dense in it.
        several = len(declared.plane_bytes) > 1
        return "layout" if several and cache.layout in TOKEN_MAJOR else ""
    if isinstance(backend, Declares):
        return "hook"
    if cache.backend not in PACKED:
        return "backend"
    return "slots" if cache.has_plain_content else "content"


def opaque(cache: LayerCache) -> PageFormat:
    """A format that equals only itself: the page as one run of bytes, named by what keeps it."""
    facts = (cache.backend, cache.layout, cache.dtype, cache.is_shuffled, cache.identity)
    shape = (cache.kv_heads, cache.tokens, cache.head_dim, cache.page_bytes)
    digest = hashlib.sha256(repr((facts, shape)).encode()).hexdigest()
    tokens = cache.tokens if cache.page_bytes % cache.tokens == 0 else 1
    channels = cache.page_bytes // tokens
    whole = Component(
        f"opaque_{digest[:24]}",
        dtype="uint8",
        heads=1,
        tokens=tokens,
        channels=channels,
        plane=0,
        base_bytes=0,
        head_stride_bytes=0,
        token_tile=tokens,
        token_tile_stride_bytes=0,
        token_stride_bytes=channels,
        channel_tile=channels,
        channel_tile_stride_bytes=0,
        channel_stride_bytes=1,
    )
    return PageFormat.from_components("opaque", [whole], [cache.page_bytes])


def spans_of(format: PageFormat, num_regions: int, index: int) -> list[PlaneSpan]:
    """Which bytes of a page the `index`-th of `num_regions` equal regions holds.

    vLLM cuts a page into head slots of equal size, in order, and gives each its own region or none
    its own; planes follow each other in the same order.

    Raises:
        FormatError: the page cannot be cut into that many equal parts.
    """
    length, rest = divmod(format.page_bytes, num_regions)
    if rest:
        raise FormatError(
            f"{num_regions} regions do not share {format.page_bytes} bytes equally",
            code="regions-per-page",
            field="num_regions",
            got=num_regions,
            expected=f"a divisor of {format.page_bytes}",
        )
    first, last, start = index * length, (index + 1) * length, 0
    spans = []
    for plane, plane_bytes in enumerate(format.plane_bytes):
        low, high = max(first, start), min(last, start + plane_bytes)
        if low < high:
            spans.append(PlaneSpan(plane, low - start, high - low))
        start += plane_bytes
    return spans


def declared_format(cache: LayerCache, backend: object) -> PageFormat | None:
    """What the backend's hook or the tables say; None when nobody declares the format."""
    if isinstance(backend, Declares):
        return backend.kvpd_page_format(
            kv_heads=cache.kv_heads,
            tokens=cache.tokens,
            head_dim=cache.head_dim,
            dtype=cache.dtype,
            layout=cache.layout,
        )
    if cache.backend not in PACKED or not cache.has_plain_content:
        return None
    if cache.is_shuffled:
        # Two slots alone mean nothing: other backends publish two and place V differently.
        if cache.backend == AITER_FA and cache.num_head_slots == 2:
            return PageFormat.aiter_shuffle(
                heads=cache.kv_heads,
                tokens=cache.tokens,
                head_dim=cache.head_dim,
                dtype=cache.dtype,
            )
        return None
    if cache.num_head_slots is not None:
        return None
    return PageFormat.standard(
        heads=cache.kv_heads,
        tokens=cache.tokens,
        head_dim=cache.head_dim,
        dtype=cache.dtype,
        interior=cache.interior,
    )
