"""The reference conversion: plain torch, any two formats with the same components, any device.

Each component is a strided view of a page's bytes, its two tiled axes split as the format splits
them; one reshape turns the source's split into the target's. The kernels derive their index
arithmetic otherwise and are compared with this.
"""

from __future__ import annotations

from math import gcd

import torch

from kvpd.convert.components import Placed, match_components
from kvpd.convert.conversion import Conversion, without_padding
from kvpd.convert.pages import Pages

# Bit patterns are moved, as integers of the widest kind that every element and offset is made of.
_UNIT_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


class ReferenceConversion(Conversion):
    """Gathers every page of a layer, permutes, and only then writes."""

    def __init__(self, source: Pages, target: Pages) -> None:
        super().__init__(source, target)
        self._pairs = match_components(source.format, target.format)
        placed = [side for pair in self._pairs for side in pair]
        page_bytes = (source.format.page_bytes, target.format.page_bytes)
        self._unit_bytes = gcd(4, *page_bytes, *(n for p in placed for n in _all_bytes(p)))

    def _run(self, source_ids: torch.Tensor, target_ids: torch.Tensor) -> None:
        rows_in, rows_out = without_padding(source_ids, target_ids)
        for source, target in zip(self.source.layers, self.target.layers, strict=True):
            raw = _gathered(source, rows_in)
            # Read as well, so that padding is written back as it was.
            out = _gathered(target, rows_out)
            for placed_in, placed_out in self._pairs:
                elements = _elements(out, placed_out, self._unit_bytes)
                values = _elements(raw, placed_in, self._unit_bytes)
                elements.copy_(values.reshape(elements.shape))
            start = 0
            for piece in target:
                wide = _wide(piece)
                part = out[:, start : start + piece.shape[1]].contiguous()
                wide[rows_out] = part.view(wide.dtype)
                start += piece.shape[1]


def _gathered(pieces: tuple[torch.Tensor, ...], rows: torch.Tensor) -> torch.Tensor:
    """uint8 [pages, page_bytes]: pages of a layer, whole."""
    return torch.cat([_wide(piece)[rows].view(torch.uint8) for piece in pieces], dim=1)


def _wide(piece: torch.Tensor) -> torch.Tensor:
    """The same bytes in eights where they divide: torch moves rows on a CPU element by element."""
    numbers = (piece.shape[1], piece.stride(0), piece.storage_offset())
    return piece.view(torch.int64) if all(number % 8 == 0 for number in numbers) else piece


def _axes(placed: Placed) -> list[tuple[int, int]]:
    """(extent, stride in bytes) of [H, N/t, t, D/u, u], t and u being the tiles of the format."""
    c = placed.component
    return [
        (c.heads, c.head_stride_bytes),
        (c.tokens // c.token_tile, c.token_tile_stride_bytes),
        (c.token_tile, c.token_stride_bytes),
        (c.channels // c.channel_tile, c.channel_tile_stride_bytes),
        (c.channel_tile, c.channel_stride_bytes),
    ]


def _all_bytes(placed: Placed) -> list[int]:
    """Every number that an offset of the component is a sum of multiples of, and its width."""
    start_bytes = placed.page_start_bytes + placed.component.base_bytes
    strides_bytes = [stride for extent, stride in _axes(placed) if extent > 1]
    return [start_bytes, placed.component.element_bytes, *strides_bytes]


def _elements(pages: torch.Tensor, placed: Placed, unit_bytes: int) -> torch.Tensor:
    """A component of dense pages [pages, page_bytes], as a view in units of
    [pages, H, N/t, t, D/u, u, units of an element]."""
    flat = pages.view(-1).view(_UNIT_DTYPES[unit_bytes])
    axes = [
        (pages.shape[0], pages.shape[1]),
        *_axes(placed),
        (placed.component.element_bytes // unit_bytes, unit_bytes),
    ]
    return flat.as_strided(
        [extent for extent, _ in axes],
        [stride // unit_bytes for _, stride in axes],
        (placed.page_start_bytes + placed.component.base_bytes) // unit_bytes,
    )
