"""A page format of somebody's own that is no permutation of the standard one, and its converter.

Per block [H, N, 2*D]: V first, then K with every 16-bit element XORed with a key. Nothing here
needs vLLM; the backend that keeps such pages is `tests.vllm.backends.KeyedBackend`.
"""

from __future__ import annotations

import torch

from kvpd import PageFormat
from kvpd._kvpd import Component
from kvpd.convert import Conversion, Pages

KEY = 0x5AA5


def keyed_format(*, heads: int, tokens: int, head_dim: int, dtype: str) -> PageFormat:
    """The format as declared: the scrambled K is bytes of another name, never "k"."""
    row_bytes = 2 * head_dim  # of K or V of one token; elements are two bytes long

    def component(name: str, dtype: str, channels: int, base: int, stride: int) -> Component:
        return Component(
            name,
            dtype=dtype,
            heads=heads,
            tokens=tokens,
            channels=channels,
            plane=0,
            base_bytes=base,
            head_stride_bytes=tokens * 2 * row_bytes,
            token_tile=tokens,
            token_tile_stride_bytes=0,
            token_stride_bytes=2 * row_bytes,
            channel_tile=channels,
            channel_tile_stride_bytes=0,
            channel_stride_bytes=stride,
        )

    return PageFormat.from_components(
        "keyed",
        [
            component("k_keyed", "uint8", row_bytes, row_bytes, 1),
            component("v", dtype, head_dim, 0, 2),
        ],
        [heads * tokens * 2 * row_bytes],
    )


class KeyedConversion(Conversion):
    """Standard pages of 16-bit elements into keyed pages, in place or from a slab."""

    def __init__(self, source: Pages, target: Pages) -> None:
        super().__init__(source, target)
        v = next(c for c in target.format.components if c.name == "v")
        self._shape = (v.heads, v.tokens, 2, v.channels)

    def _run(self, source_ids: torch.Tensor, target_ids: torch.Tensor) -> None:
        kept = (source_ids >= 0) & (target_ids >= 0)
        rows_in, rows_out = source_ids[kept].long(), target_ids[kept].long()
        for (source,), (target,) in zip(self.source.layers, self.target.layers, strict=True):
            raw = source[rows_in].view(torch.int16).view(-1, *self._shape)
            keyed = torch.stack((raw[..., 1, :], raw[..., 0, :] ^ KEY), dim=-2)
            target[rows_out] = keyed.view(torch.uint8).view(-1, target.shape[1])


def converters(target: PageFormat) -> list[tuple[PageFormat, type[Conversion]]]:
    """What `KeyedBackend` hands to the connector: from standard pages of the same shape."""
    v = next(c for c in target.components if c.name == "v")
    standard = PageFormat.standard(
        heads=v.heads, tokens=v.tokens, head_dim=v.channels, dtype=v.dtype
    )
    return [(standard, KeyedConversion)]
