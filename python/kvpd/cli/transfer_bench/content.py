"""What the caches hold, by plain reshapes: nothing here uses kvpd's strides.

Every element of the prefill's cache is a hash of its own place (layer, block, token, K or V, head,
channel), so the decoder can tell what any page must be, and an element elsewhere has another value
(but for chance).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kvpd.cli.transfer_bench.scenario import ELEMENT_BYTES, Scenario

_ODD = -7046029254386353131  # 2^64 divided by the golden ratio, as int64
_X = 16 // ELEMENT_BYTES
_STEP_BLOCKS = 256


def elements(scenario: Scenario, layer: int, blocks: torch.Tensor) -> torch.Tensor:
    """K and V of some blocks, [n, N, 2, H, D] int16; `blocks` [n] int64."""
    s = scenario
    per_block = s.tokens * 2 * s.heads * s.head_dim
    inside = torch.arange(per_block, dtype=torch.int64, device=blocks.device)
    place = (layer * s.num_blocks + blocks)[:, None] * per_block + inside[None, :]
    # Bits 40 to 55 depend on all lower bits of the place.
    mixed = ((place * _ODD) >> 40).to(torch.int16)
    return mixed.view(len(blocks), s.tokens, 2, s.heads, s.head_dim)


def standard_pages(scenario: Scenario, layer: int, blocks: torch.Tensor) -> torch.Tensor:
    """[n, page bytes]: [H, N, K then V]."""
    values = elements(scenario, layer, blocks).permute(0, 3, 1, 2, 4)
    return _bytes(values)


def shuffled_planes(
    scenario: Scenario, layer: int, blocks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """K plane [H, D/x, N, x] and V plane [H, N/x, D, x], each [n, plane bytes]."""
    s, n = scenario, len(blocks)
    values = elements(scenario, layer, blocks)
    k = values[:, :, 0].reshape(n, s.tokens, s.heads, s.head_dim // _X, _X)
    v = values[:, :, 1].reshape(n, s.tokens // _X, _X, s.heads, s.head_dim)
    return _bytes(k.permute(0, 2, 3, 1, 4)), _bytes(v.permute(0, 3, 1, 4, 2))


def all_standard_pages(
    scenario: Scenario, device: torch.device
) -> Iterator[tuple[int, slice, torch.Tensor]]:
    """(layer, blocks, their pages) until the prefill's cache is covered."""
    for layer in range(scenario.layers):
        for first in range(0, scenario.num_blocks, _STEP_BLOCKS):
            last = min(first + _STEP_BLOCKS, scenario.num_blocks)
            blocks = torch.arange(first, last, dtype=torch.int64, device=device)
            yield layer, slice(first, last), standard_pages(scenario, layer, blocks)


def _bytes(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(len(values), -1).view(torch.uint8)
