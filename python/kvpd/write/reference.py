"""The reference writer: plain torch, any format of K and V, any device.

Where an element goes is asked of the format element by element. The kernel derives its index
arithmetic from strides and is compared with this.
"""

from __future__ import annotations

from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvpd.errors import WriteError
from kvpd.write.plan import EIGHT_BIT_FLOATS, Work
from kvpd.write.writer import Batch, Norm, Rotation, Writer

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvpd._kvpd import PageFormat
    from kvpd.convert import Pages

_INTEGERS = {1: torch.uint8, 2: torch.int16}


class ReferenceWriter(Writer):
    """Norm, rotation and stores one after the other."""

    def __init__(self, pages: Pages, layer: int) -> None:
        super().__init__(pages, layer)
        self._offsets = page_offsets(pages.format)

    def _run(self, batch: Batch, work: Work) -> None:
        key = batch.key
        if batch.rotation is not None:
            norm, rotation = batch.norm, batch.rotation
            if batch.query is not None:
                query = _turned(batch.query, rotation, norm, norm.query_weight if norm else None)
                out = batch.query if batch.query_out is None else batch.query_out
                if work.query_dtype in EIGHT_BIT_FLOATS:
                    scale = batch.scales.query if batch.scales is not None else None
                    assert scale is not None  # checked by the caller
                    query = _saturated(query.float() * (1 / scale), out.dtype)
                out.copy_(query)
            key = _turned(batch.key, rotation, norm, norm.key_weight if norm else None)
            (batch.key if batch.key_out is None else batch.key_out).copy_(key)
        slots = batch.slots.long()
        self._check_slots(slots)
        kept = slots >= 0
        scales = batch.scales
        for name, rows, scale in (
            ("k", key, scales.key if scales else None),
            ("v", batch.value, scales.value if scales else None),
        ):
            self._store(name, rows[: len(slots)][kept], scale, slots[kept])

    def _check_slots(self, slots: torch.Tensor) -> None:
        """Refuse slots behind the last block, where they can be looked at."""
        end = self.pages.num_blocks * self._component.tokens
        if slots.device.type == "cpu" and slots.numel() and int(slots.max()) >= end:
            raise WriteError(
                f"slot {int(slots.max())} of {end}",
                code="slot-range",
                field="slots",
                got=int(slots.max()),
                expected=f"< {end}",
            )

    def _store(
        self, name: str, values: torch.Tensor, scale: torch.Tensor | None, slots: torch.Tensor
    ) -> None:
        """Write [tokens, heads, D] at `slots`."""
        if self._component.dtype in EIGHT_BIT_FLOATS:
            assert scale is not None  # checked by the caller
            values = _saturated(values.float() / scale, getattr(torch, self._component.dtype))
        size = self._component.element_bytes
        bits = values.contiguous().view(_INTEGERS[size])
        tokens = self._component.tokens
        offsets = self._offsets[name].to(slots.device)[slots % tokens]  # [tokens, heads, D]
        blocks = (slots // tokens)[:, None, None].expand_as(offsets)
        start = 0
        for piece in self.pages.layers[self.layer]:
            elements = piece.view(_INTEGERS[size])
            inside = (offsets >= start) & (offsets < start + piece.shape[1])
            elements[blocks[inside], (offsets[inside] - start) // size] = bits[inside]
            start += piece.shape[1]


@cache
def page_offsets(format: PageFormat) -> dict[str, torch.Tensor]:
    """Of k and of v: int64 [tokens, heads, D], the byte of the page where each element lies."""
    starts = list(accumulate(format.plane_bytes, initial=0))
    found = {}
    for component in format.components:
        shape = (component.tokens, component.heads, component.channels)
        offsets: NDArray[np.int64] = np.empty(shape, dtype=np.int64)
        for token, head, channel in np.ndindex(shape):
            plane, offset = format.offset(component.name, head, token, channel)
            offsets[token, head, channel] = starts[plane] + offset
        found[component.name] = torch.from_numpy(offsets)
    return found


def _turned(
    rows: torch.Tensor, rotation: Rotation, norm: Norm | None, weight: torch.Tensor | None
) -> torch.Tensor:
    """Normed and rotated rows, in a tensor of their own."""
    if norm is not None and weight is not None:
        rows = rms_norm(rows, weight, norm.epsilon)
    return rotated(rows, rotation)


def rotated(rows: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """RoPE of [rows, heads, D] in float32, rounded once."""
    rotary_dim = rotation.cos_sin.shape[1]
    cos, sin = rotation.cos_sin[rotation.positions].float()[:, None].chunk(2, dim=-1)
    turned = rows[..., :rotary_dim].float()
    if rotation.is_neox:
        x, y = turned.chunk(2, dim=-1)
    else:
        x, y = turned[..., ::2], turned[..., 1::2]
    pair = (x * cos - y * sin, y * cos + x * sin)
    joined = torch.cat(pair, dim=-1) if rotation.is_neox else torch.stack(pair, -1).flatten(-2)
    return torch.cat((joined.to(rows.dtype), rows[..., rotary_dim:]), dim=-1)


def rms_norm(rows: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """RMS norm in float32, rounded once; the additions in the order of vLLM's kernel on NVIDIA."""
    numbers = rows.float()
    dim = rows.shape[-1]
    padded = 1 << (dim - 1).bit_length()
    squares = torch.nn.functional.pad(numbers * numbers, (0, padded - dim))
    eights = squares.unflatten(-1, (padded // 8, 8))
    total = eights[..., 0]
    for index in range(1, 8):
        total = total + eights[..., index]
    while total.shape[-1] > 1:
        total = total[..., 0::2] + total[..., 1::2]
    return (numbers * torch.rsqrt(total / dim + epsilon) * weight.float()).to(rows.dtype)


def _saturated(numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    limit = torch.finfo(dtype).max
    return numbers.clamp(-limit, limit).to(dtype)
