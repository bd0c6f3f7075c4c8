"""What is moved: both caches and where they are."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from kvpd._kvpd import EngineFacts, PageFormat, __version__

ELEMENT_BYTES = 2
DTYPE = "bfloat16"


@dataclass(frozen=True)
class Scenario:
    """Two caches of one shape; the prefill keeps standard pages, the decoder shuffled ones.

    Attributes:
        layers, heads, tokens, head_dim: of a rank; `tokens` per page.
        num_blocks: of each cache.
        prefill_device, decode_device: "cpu", or "cuda:N".
        nixl_threads: with which both agents post, as in an engine.
    """

    layers: int
    heads: int
    tokens: int
    head_dim: int
    num_blocks: int
    prefill_device: str
    decode_device: str
    nixl_threads: int = 4

    @property
    def standard(self) -> PageFormat:
        """The prefill's format."""
        return PageFormat.standard(**self._shape)

    @property
    def shuffled(self) -> PageFormat:
        """The decoder's format."""
        return PageFormat.aiter_shuffle(**self._shape)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page of one layer."""
        return 2 * self.heads * self.tokens * self.head_dim * ELEMENT_BYTES

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers."""
        return self.layers * self.page_bytes

    @property
    def cache_bytes(self) -> int:
        """Bytes of a cache."""
        return self.num_blocks * self.block_bytes

    @property
    def layer_names(self) -> list[str]:
        """Names of the layers."""
        return [f"layers.{layer}" for layer in range(self.layers)]

    @property
    def has_link(self) -> bool:
        """Whether bytes cross from one GPU to another."""
        return self.decode_device != "cpu" and self.decode_device != self.prefill_device

    def facts(self, layout: str) -> EngineFacts:
        """What a side says about itself."""
        return EngineFacts(
            model="kvpd-bench",
            # There is no model: nothing about one is unknown.
            model_config={},
            model_weights="none",
            model_dtype=DTYPE,
            cache_dtype=DTYPE,
            total_kv_heads=self.heads,
            head_dim=self.head_dim,
            block_size=self.tokens,
            layout=layout,
            backend="kvpd-bench",
            release=__version__,
            connector=__version__,
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values for the other process."""
        return asdict(self)

    @property
    def _shape(self) -> dict[str, Any]:
        return {
            "heads": self.heads,
            "tokens": self.tokens,
            "head_dim": self.head_dim,
            "dtype": DTYPE,
        }
