"""What a batch becomes, without kvpd: norm, rotation and quantisation in numpy, token by token.

Every operation is one of float32, in the order that is written here; roundings to narrower types
are torch's casts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


def rounded(numbers: NDArray[Any], dtype: torch.dtype) -> torch.Tensor:
    """Float32 numbers in another type, to nearest even."""
    return torch.from_numpy(np.ascontiguousarray(numbers, dtype=np.float32)).to(dtype)


def rms_norm(rows: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """vLLM's norm on NVIDIA: a thread adds eight squares, a warp adds its threads pairwise.

    The thread at distance `step` is added if there is one.
    """
    numbers, weights = rows.float().numpy(), weight.float().numpy()
    dim = np.float32(rows.shape[-1])
    out = np.empty_like(numbers)
    for index in np.ndindex(rows.shape[:-1]):
        row = numbers[index]
        threads = []
        for start in range(0, row.size, 8):
            total = np.float32(0)
            for number in row[start : start + 8]:
                total = total + number * number
            threads.append(total)
        step = 1
        while step < len(threads):
            for thread in range(0, len(threads) - step, 2 * step):
                threads[thread] = threads[thread] + threads[thread + step]
            step *= 2
        scale = np.float32(1) / np.sqrt(threads[0] / dim + np.float32(epsilon))
        out[index] = row * scale * weights
    return rounded(out, rows.dtype)


def rotated(
    rows: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, *, is_neox: bool
) -> torch.Tensor:
    """RoPE of [rows, heads, D], a pair of channels after the other."""
    out = rows.float().numpy().copy()
    half = cos_sin.shape[1] // 2
    for row, position in enumerate(positions.tolist()):
        angles = cos_sin[position].float().numpy()
        for pair in range(half):
            first, second = (pair, pair + half) if is_neox else (2 * pair, 2 * pair + 1)
            cos, sin = angles[pair], angles[half + pair]
            x, y = out[row, :, first].copy(), out[row, :, second].copy()
            out[row, :, first] = x * cos - y * sin
            out[row, :, second] = y * cos + x * sin
    return rounded(out, rows.dtype)


def divided(rows: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """rows / scale in an 8-bit float, saturating."""
    return _saturated(rows.float().numpy() / np.float32(scale), dtype)


def query_quantised(rows: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """rows times the scale's reciprocal, saturating: vLLM's static quantisation."""
    return _saturated(rows.float().numpy() * (np.float32(1) / np.float32(scale)), dtype)


def _saturated(numbers: NDArray[Any], dtype: torch.dtype) -> torch.Tensor:
    limit = np.float32(torch.finfo(dtype).max)
    return rounded(np.clip(numbers, -limit, limit), dtype)
