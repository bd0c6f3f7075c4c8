"""What is written: a model's layers, each with Q, K and V of a batch and pages of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from kvpd import PageFormat
from kvpd.convert import Pages
from kvpd.write import Norm, Rotation, Scales

# One token of many requests each, or a chunk of one prompt.
Order = Literal["decode", "chunk"]
# A chunk rarely begins where a page does.
_FIRST_SLOT = 5
EPSILON = 1e-6


@dataclass(frozen=True)
class Shape:
    """A model as its attention layers see it."""

    name: str
    layers: int
    query_heads: int
    kv_heads: int
    tokens: int
    head_dim: int
    cache_dtype: str = "bfloat16"
    family: Literal["shuffled", "transposed", "packed"] = "shuffled"

    def format(self) -> PageFormat:
        """The format of its pages."""
        if self.family == "packed":
            return PageFormat.standard(
                heads=self.kv_heads,
                tokens=self.tokens,
                head_dim=self.head_dim,
                dtype=self.cache_dtype,
            )
        return PageFormat.aiter_shuffle(
            heads=self.kv_heads,
            tokens=self.tokens,
            head_dim=self.head_dim,
            dtype=self.cache_dtype,
            v="tiled" if self.family == "shuffled" else "transposed",
        )


QWEN3_8B = Shape("Qwen3-8B", 36, 32, 8, 16, 128)


@dataclass
class Layer:
    """One layer's tensors; `rows` are Q, K and V side by side as the projection leaves them."""

    rows: torch.Tensor
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    query_out: torch.Tensor
    key_out: torch.Tensor


@dataclass
class Workload:
    """A batch for every layer, and where it goes."""

    shape: Shape
    layers: list[Layer]
    memory: torch.Tensor
    pages: Pages
    slots: torch.Tensor
    rotation: Rotation
    norm: Norm
    scales: Scales

    def planes(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K's and V's plane of a layer, [blocks, elements of a plane]."""
        dtype = getattr(torch, self.shape.cache_dtype)
        key, value = self.pages.layers[layer]
        return key.view(dtype), value.view(dtype)


def make_workload(
    shape: Shape, num_tokens: int, order: Order, device: torch.device, layers: int | None = None
) -> Workload:
    """Random numbers of a model's size, the same ones in every run."""
    generator = torch.Generator(device).manual_seed(num_tokens)
    count = shape.layers if layers is None else layers
    num_blocks = 3 * (num_tokens if order == "decode" else num_tokens // shape.tokens + 2)
    page_bytes = shape.format().page_bytes
    memory = torch.empty(count * num_blocks * page_bytes, dtype=torch.uint8, device=device)
    memory.view(torch.int64).random_(generator=generator)
    num_pieces = 1 if shape.family == "packed" else 2
    pieces = memory.view(count, num_pieces, num_blocks, page_bytes // num_pieces)
    pages = Pages(shape.format(), tuple(tuple(pieces[layer]) for layer in range(count)))

    def numbers(*size: int) -> torch.Tensor:
        drawn = torch.randn(size, generator=generator, device=device)
        return drawn.to(torch.bfloat16)

    angles = torch.arange(32768.0, device=device)[:, None] * 10000.0 ** -torch.linspace(
        0, 1, shape.head_dim // 2, device=device
    )
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1).to(torch.bfloat16)
    positions = torch.arange(num_tokens, device=device)
    if order == "decode":
        positions = torch.randint(0, 32768, (num_tokens,), generator=generator, device=device)
    one = torch.ones(1, device=device)
    return Workload(
        shape,
        [_layer(shape, numbers, num_tokens) for _ in range(count)],
        memory,
        pages,
        torch.from_numpy(_slots(shape, num_tokens, order, num_blocks)).to(device),
        Rotation(positions, cos_sin, is_neox=True),
        Norm(numbers(shape.head_dim), numbers(shape.head_dim), EPSILON),
        Scales(one, one.clone()),
    )


def _layer(shape: Shape, numbers: object, num_tokens: int) -> Layer:
    heads, dim = (shape.query_heads, shape.kv_heads, shape.kv_heads), shape.head_dim
    assert callable(numbers)
    rows: torch.Tensor = numbers(num_tokens, sum(heads) * dim)
    sizes = [number * dim for number in heads]
    query, key, value = (
        part.view(num_tokens, number, dim)
        for part, number in zip(torch.split_with_sizes(rows, sizes, dim=-1), heads, strict=True)
    )
    return Layer(
        rows, query, key, value, torch.empty_like(query.contiguous()), torch.empty_like(key)
    )


def _slots(shape: Shape, num_tokens: int, order: Order, num_blocks: int) -> np.ndarray:
    rng = np.random.default_rng(num_tokens)
    blocks = rng.permutation(num_blocks)
    if order == "decode":
        inside = rng.integers(0, shape.tokens, num_tokens)
        return blocks[:num_tokens] * shape.tokens + inside
    every = blocks[:, None] * shape.tokens + np.arange(shape.tokens)
    return every.reshape(-1)[_FIRST_SLOT:][:num_tokens]
