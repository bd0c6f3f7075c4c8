"""What is converted: models' caches on the GPU, and the ids of a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from kvpd import PageFormat
from kvpd.convert import Pages

Ids = Literal["random", "sorted", "contiguous"]
Placement = Literal["in-place", "staged"]


@dataclass(frozen=True)
class Shape:
    """A cache: layers, KV heads of a rank, tokens per page, head size, element type."""

    name: str
    layers: int
    heads: int
    tokens: int
    head_dim: int
    dtype: str = "bfloat16"
    v: Literal["tiled", "transposed"] = "tiled"

    def formats(self) -> tuple[PageFormat, PageFormat]:
        """(standard, shuffled)."""
        standard = PageFormat.standard(
            heads=self.heads, tokens=self.tokens, head_dim=self.head_dim, dtype=self.dtype
        )
        shuffled = PageFormat.aiter_shuffle(
            heads=self.heads, tokens=self.tokens, head_dim=self.head_dim, dtype=self.dtype, v=self.v
        )
        return standard, shuffled

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers."""
        return self.layers * self.formats()[0].page_bytes


QWEN3_8B = Shape("Qwen3-8B", 36, 8, 16, 128)

SHAPES = (
    QWEN3_8B,
    Shape("Qwen3-8B fp8", 36, 8, 16, 128, "float8_e4m3fn"),
    Shape("Qwen3-8B N32", 36, 8, 32, 128),
    Shape("Qwen3-8B V transposed", 36, 8, 16, 128, v="transposed"),
    Shape("H1 D128", 80, 1, 16, 128),
    Shape("H2 D128", 64, 2, 16, 128),
    Shape("H4 D128", 64, 4, 16, 128),
    Shape("H3 D128", 36, 3, 16, 128),
    Shape("H5 D128", 36, 5, 16, 128),
    Shape("H8 D64", 36, 8, 16, 64),
    Shape("H8 D64 fp8", 36, 8, 16, 64, "float8_e4m3fn"),
    Shape("H4 D256", 48, 4, 16, 256),
    Shape("H1 D64 N32 fp8", 80, 1, 32, 64, "float8_e4m3fn"),
    Shape("H8 N32 D256 (256 KiB)", 36, 8, 32, 256),
    Shape("H16 N32 D256 (512 KiB)", 36, 16, 32, 256),
)


@dataclass
class Cache:
    """One allocation: pages of all layers, dense, each layer in `num_pieces` planes."""

    memory: torch.Tensor
    pages: Pages


def make_cache(
    format: PageFormat, layers: int, num_blocks: int, num_pieces: int, device: torch.device
) -> Cache:
    """Random bytes, viewed as pages of `format`."""
    piece = format.page_bytes // num_pieces
    total = layers * num_blocks * format.page_bytes
    memory = torch.empty(total, dtype=torch.uint8, device=device)
    memory.view(torch.int64).random_()
    planes = memory.view(layers, num_pieces, num_blocks, piece)
    pages = Pages(format, tuple(tuple(planes[layer]) for layer in range(layers)))
    return Cache(memory, pages)


def make_ids(kind: Ids, count: int, num_blocks: int, device: torch.device) -> torch.Tensor:
    """`count` distinct blocks of `num_blocks`, the same ones in every run; int32."""
    chosen: Sequence[int] | np.ndarray = np.random.default_rng(7).permutation(num_blocks)[:count]
    if kind == "sorted":
        chosen = np.sort(chosen)
    elif kind == "contiguous":
        chosen = np.arange(count) + (num_blocks - count) // 2
    return torch.tensor(np.asarray(chosen), dtype=torch.int32, device=device)
