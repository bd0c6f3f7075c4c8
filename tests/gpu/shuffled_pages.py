# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""Triton kernels of a decoder that keeps AITER's shuffled pages: a writer, and the way back.

A page is a K plane [H, D/x, N, x] and a V plane [H, N/x, D, x], x = 16 / element bytes. Nothing is
shared with kvpd's conversion kernels: what these write is what kvpd's pages are compared with.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _write_kernel(
    key,  # [T, H, D], rows dense
    value,  # [T, H, D], rows dense
    k_planes,
    v_planes,
    slots,  # [T], token slots; negative ones are padding
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    block_stride,
    N: tl.constexpr,
    D: tl.constexpr,
    X: tl.constexpr,
):
    """One token and head: its K and V into their places."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(slots + token).to(tl.int64)
    if slot >= 0:
        n = slot % N
        tile = (slot // N) * block_stride + head * (N * D)
        d = tl.arange(0, D)
        k = tl.load(key + token * key_token_stride + head * key_head_stride + d)
        v = tl.load(value + token * value_token_stride + head * value_head_stride + d)
        tl.store(k_planes + tile + (d // X) * (N * X) + n * X + d % X, k)
        tl.store(v_planes + tile + (n // X) * (D * X) + d * X + n % X, v)


@triton.jit
def _unshuffle_kernel(
    k_planes,
    v_planes,
    block_stride,
    packed,  # [B, H, N, 2*D]
    block_table,  # [R, blocks], rows dense
    table_stride,
    seq_lens,  # [R], tokens
    N: tl.constexpr,
    D: tl.constexpr,
    X: tl.constexpr,
):
    """One block of a request and head: its tile, packed, under the same block id."""
    request = tl.program_id(0)
    position = tl.program_id(1)
    head = tl.program_id(2)
    if position * N < tl.load(seq_lens + request):
        block = tl.load(block_table + request * table_stride + position).to(tl.int64)
        tile = block * block_stride + head * (N * D)
        n = tl.arange(0, N)[:, None]
        d = tl.arange(0, D)[None, :]
        k = tl.load(k_planes + tile + (d // X) * (N * X) + n * X + d % X)
        v = tl.load(v_planes + tile + (n // X) * (D * X) + d * X + n % X)
        row = packed + (block * tl.num_programs(2) + head) * (N * 2 * D) + n * (2 * D) + d
        tl.store(row, k)
        tl.store(row + D, v)


def write_tokens(
    key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """Write K and V [T, H, D] of the tokens at `slots` [T] into `cache` [B, 2, N, H*D]."""
    num_tokens, (heads, dim) = slots.shape[0], key.shape[1:]
    if not num_tokens:
        return
    _write_kernel[(num_tokens, heads)](
        key,
        value,
        *_planes(cache),
        slots,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        cache.stride(0),
        N=cache.shape[2],
        D=dim,
        X=16 // cache.element_size(),
    )


def unshuffle(
    cache: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor, packed: torch.Tensor
) -> None:
    """Copy the pages that requests use from `cache` [B, 2, N, H*D] to `packed` [B, H, N, 2*D].

    Every page keeps its block id, so a page that two requests share is written twice with the same
    bytes. The launch depends on shapes only: it can be captured in a CUDA graph.

    Args:
        block_table: [R, blocks] int32.
        seq_lens: [R], tokens of each request; 0 for padding.
    """
    _, heads, tokens, width = packed.shape
    _unshuffle_kernel[(seq_lens.shape[0], block_table.shape[1], heads)](
        *_planes(cache),
        cache.stride(0),
        packed,
        block_table,
        block_table.stride(0),
        seq_lens,
        N=tokens,
        D=width // 2,
        X=16 // cache.element_size(),
    )


def _planes(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = cache[:, 0], cache[:, 1]
    # A tile inside a block is addressed as dense; anything else would be written elsewhere.
    if not (k[0].is_contiguous() and v[0].is_contiguous()):
        raise ValueError(f"planes of {tuple(cache.shape)} with strides {cache.stride()}")
    return k, v
