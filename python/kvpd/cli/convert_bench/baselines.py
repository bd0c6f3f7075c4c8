"""What one would do without the kernels: torch operations, or the engine's writer, per layer."""

from __future__ import annotations

from typing import Any

import torch

from kvpd.cli.convert_bench.workloads import Shape
from kvpd.cli.convert_bench.writer import write_tokens
from kvpd.convert import Pages

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def _integers(shape: Shape) -> torch.dtype:
    return _INTEGERS[shape.formats()[0].components[0].element_bytes]


def torch_operations(shape: Shape, pages: Pages, ids: torch.Tensor) -> None:
    """Standard pages whose halves lie in the K and V planes become shuffled planes, in place."""
    dtype = _integers(shape)
    heads, tokens, head_dim = shape.heads, shape.tokens, shape.head_dim
    x = 16 // dtype.itemsize
    for k_plane, v_plane in pages.layers:
        raw = torch.cat([k_plane[ids], v_plane[ids]], dim=1).view(dtype)
        packed = raw.view(-1, heads, tokens, 2 * head_dim)
        k = packed[..., :head_dim].reshape(-1, heads, tokens, head_dim // x, x)
        v = packed[..., head_dim:].reshape(-1, heads, tokens // x, x, head_dim)
        k_plane.view(dtype)[ids] = k.permute(0, 1, 3, 2, 4).reshape(len(ids), -1)
        v_plane.view(dtype)[ids] = v.permute(0, 1, 2, 4, 3).reshape(len(ids), -1)


def writer_again(
    shape: Shape, kernel: Any, pages: Pages, ids: torch.Tensor, slots: torch.Tensor
) -> None:
    """The same by reading the tokens back and writing them with the engine's own writer."""
    dtype = _integers(shape)
    heads, tokens, head_dim = shape.heads, shape.tokens, shape.head_dim
    for k_plane, v_plane in pages.layers:
        raw = torch.cat([k_plane[ids], v_plane[ids]], dim=1).view(dtype)
        by_token = raw.view(-1, heads, tokens, 2 * head_dim).permute(0, 2, 1, 3)
        key = by_token[..., :head_dim].reshape(-1, heads, head_dim)
        value = by_token[..., head_dim:].reshape(-1, heads, head_dim)
        write_tokens(kernel, key, value, k_plane.view(dtype), v_plane.view(dtype), slots, tokens)


def slots_of(shape: Shape, ids: torch.Tensor) -> torch.Tensor:
    """int64 [pages * N]: where each token of each page goes."""
    tokens = torch.arange(shape.tokens, device=ids.device)
    return (ids.long()[:, None] * shape.tokens + tokens).reshape(-1)
