"""vLLM's tensor of one layer's cache, seen as pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvpd.convert import Pages
from kvpd.errors import WriteError

if TYPE_CHECKING:
    from kvpd._kvpd import PageFormat


def interior_layout(cache: torch.Tensor) -> str:
    """The name of a layout with the interior of `cache` [blocks, head slots, tokens, content]."""
    is_token_major = cache.shape[1] > 1 and cache.stride(1) < cache.stride(2)
    return "LBNHC" if is_token_major else "LBHNC"


def pages_of(cache: torch.Tensor, format: PageFormat) -> Pages:
    """`cache` [blocks, head slots, tokens, content], any strides between blocks and slots.

    Raises:
        WriteError: neither a block nor its slots are one run of bytes each.
        ConversionError: they are not as long as a page of `format`.
    """
    if cache.dim() == 4 and cache.stride(3) == 1:
        raw = cache.view(torch.uint8)
        if _is_dense(raw[0]):
            return Pages(format, ((_run(raw, 0, raw[0].numel()),),))
        if all(_is_dense(raw[0, slot]) for slot in range(raw.shape[1])):
            size = raw[0, 0].numel()
            starts = [slot * raw.stride(1) for slot in range(raw.shape[1])]
            return Pages(format, (tuple(_run(raw, start, size) for start in starts),))
    shape, strides = list(cache.shape), list(cache.stride())
    raise WriteError(
        f"a cache of {shape} with strides {strides} holds no page in whole head slots",
        code="scattered-page",
        field="kv_cache",
        got=f"{shape}, {strides}",
        expected="[blocks, head slots, tokens, content], dense slots",
    )


def _run(raw: torch.Tensor, start: int, size: int) -> torch.Tensor:
    """[blocks, size] bytes from `start` on in each block."""
    return raw.as_strided((raw.shape[0], size), (raw.stride(0), 1), raw.storage_offset() + start)


def _is_dense(part: torch.Tensor) -> bool:
    """Whether the elements are one run, in whatever order."""
    expected = 1
    for stride, extent in sorted(zip(part.stride(), part.shape, strict=True)):
        if extent > 1:
            if stride != expected:
                return False
            expected *= extent
    return True
