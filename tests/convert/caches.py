"""Caches for conversion tests: poisoned memory, described by regions, with its own bookkeeping.

`image` is what the memory should hold, kept by plain slicing; `Pages` only ever sees `memory`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from kvpd import PageFormat, Region
from kvpd._kvpd import PlaneSpan
from kvpd.convert import Pages
from tests.oracle.pages import Spec

Holding = Literal["joint", "planes", "heads", "interleaved"]


@dataclass(frozen=True)
class Place:
    """Page bytes [page_start, page_start + num_bytes) of block b lie at offset + b * stride."""

    page_start: int
    num_bytes: int
    offset: int
    stride: int


@dataclass
class Cache:
    """Memory with guards around and gaps between regions, all of it random at first."""

    image: NDArray[np.uint8]
    memory: torch.Tensor
    pages: Pages
    places: list[list[Place]]  # [layer][piece]

    def write(self, layer: int, block: int, page: NDArray[np.uint8]) -> None:
        """Put a page into the image."""
        for place in self.places[layer]:
            start = place.offset + block * place.stride
            piece = page[place.page_start : place.page_start + place.num_bytes]
            self.image[start : start + place.num_bytes] = piece

    def read(self, layer: int, block: int) -> NDArray[np.uint8]:
        """A page of the image."""
        return np.concatenate(
            [
                self.image[place.offset + block * place.stride :][: place.num_bytes]
                for place in self.places[layer]
            ]
        )

    def upload(self) -> None:
        """Make the memory what the image is."""
        self.memory.copy_(torch.from_numpy(self.image))

    def differing(self) -> NDArray[Any]:
        """Offsets where the memory is not what the image says."""
        return np.nonzero(self.memory.cpu().numpy() != self.image)[0]


def page_format(spec: Spec) -> PageFormat:
    """The package's format for an oracle's spec."""
    extents: dict[str, Any] = {
        "heads": spec.heads,
        "tokens": spec.tokens,
        "head_dim": spec.head_dim,
        "dtype": spec.dtype,
    }
    variant: Any = spec.variant
    if spec.family == "standard":
        return PageFormat.standard(**extents, interior=variant)
    if spec.family == "split-kv":
        return PageFormat.split_kv(**extents, interior=variant)
    return PageFormat.aiter_shuffle(**extents, v=variant)


def make_cache(
    rng: np.random.Generator,
    format: PageFormat,
    *,
    holding: Holding,
    num_layers: int,
    num_blocks: int,
    gap_bytes: int = 0,
    device: str = "cpu",
) -> Cache:
    """A cache whose layers are held as asked.

    joint: one region a layer. planes: one per half of the page. heads: one per head of a one-plane
    page. interleaved: layers side by side inside each block.
    """
    page = format.page_bytes
    num_pieces = {"joint": len(format.plane_bytes), "planes": 2, "interleaved": 1}.get(holding)
    if num_pieces is None:
        num_pieces = format.components[0].heads
    piece = page // num_pieces
    places: list[list[Place]] = []
    regions: list[Region] = []
    stride = (page if holding in ("joint", "interleaved") else piece) + gap_bytes
    if holding == "interleaved":
        stride = num_layers * (page + gap_bytes)
    # Room for a block before the first and after the last: a wrong id hits bytes that are compared.
    guard = -(-stride // 256) * 256
    total = 2 * guard + num_layers * num_pieces * (num_blocks * stride + guard)
    image = rng.integers(0, 256, total, dtype=np.uint8)
    memory = torch.from_numpy(image).to(device, copy=True)
    offset = guard + -memory.data_ptr() % 256
    for layer in range(num_layers):
        spans = _spans(format, num_pieces)
        held: list[Place] = []
        for number in range(num_pieces):
            if holding == "joint":
                held.append(Place(number * piece, piece, offset + number * piece, stride))
            elif holding == "interleaved":
                held.append(Place(0, page, guard + layer * (page + gap_bytes), stride))
            else:
                held.append(Place(number * piece, piece, offset, stride))
                regions.append(
                    _region(memory, offset, num_blocks, stride, format, [spans[number]], layer)
                )
                offset += num_blocks * stride + guard
        if holding in ("joint", "interleaved"):
            start = held[0].offset
            regions.append(_region(memory, start, num_blocks, stride, format, spans, layer))
            offset += num_blocks * stride + guard
        places.append(held)
    pages = Pages.of(format, regions, [memory])
    return Cache(image, memory, pages, places)


def _spans(format: PageFormat, num_pieces: int) -> list[PlaneSpan]:
    """The page cut in equal pieces, each inside one plane."""
    piece = format.page_bytes // num_pieces
    spans = []
    for start in range(0, format.page_bytes, piece):
        plane = 0
        while start >= format.plane_bytes[plane]:
            start -= format.plane_bytes[plane]
            plane += 1
        spans.append(PlaneSpan(plane, start, piece))
    return spans


def _region(
    memory: torch.Tensor,
    offset: int,
    num_blocks: int,
    stride: int,
    format: PageFormat,
    spans: list[PlaneSpan],
    layer: int,
) -> Region:
    return Region(
        memory.data_ptr() + offset,
        num_blocks,
        sum(span.num_bytes for span in spans),
        stride,
        format=format,
        planes=spans,
        layers=(f"layer.{layer}",),
        memory="dram" if memory.device.type == "cpu" else "vram",
    )
