"""A prefill on a GPU, in a process of its own: ``python -m tests.direct.cuda_prefill``.

Commands as in `tests.direct.prefill`; with `nixl` it can be read over NIXL too, and ``notices``
says how many have come. What its blocks hold is a formula, so that both processes
know it; standard and shuffled pages are written by reshaping whole batches, without kvpd.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvpd import EngineDescription, PageFormat, Region, wire
from kvpd.direct import Exporter
from tests.direct.prefill import serve
from tests.engine_builder import facts

if TYPE_CHECKING:
    from kvpd.nixl import Agent

POISON = 0xA5


@dataclass(frozen=True)
class CudaShape:
    """A bfloat16 cache, standard pages, `layers_per_allocation` layers in one tensor."""

    layers: int = 36
    blocks: int = 300
    heads: int = 8
    tokens: int = 16
    head_dim: int = 128
    layers_per_allocation: int = 36
    gap_bytes: int = 4096
    device: int = 0
    nixl: bool = False

    def formats(self) -> tuple[PageFormat, PageFormat]:
        """(standard, shuffled)."""
        extents = (self.heads, self.tokens, self.head_dim)
        heads, tokens, head_dim = extents
        return (
            PageFormat.standard(heads=heads, tokens=tokens, head_dim=head_dim, dtype="bfloat16"),
            PageFormat.aiter_shuffle(
                heads=heads, tokens=tokens, head_dim=head_dim, dtype="bfloat16"
            ),
        )

    @property
    def page_bytes(self) -> int:
        return 4 * self.heads * self.tokens * self.head_dim

    def elements(self, layer: int, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """k and v, int16 [blocks, H, N, D]: bits mixed from the position of each element."""
        count = self.heads * self.tokens * self.head_dim
        page = (layer * self.blocks + blocks.long())[:, None] * (2 * count)
        mixed = (page + torch.arange(2 * count, device=blocks.device)) * -7046029254386353131
        bits = (mixed >> 40).to(torch.int16)
        shape = (-1, self.heads, self.tokens, self.head_dim)
        return bits[:, :count].reshape(shape), bits[:, count:].reshape(shape)

    def standard(self, layer: int, blocks: torch.Tensor) -> torch.Tensor:
        """uint8 [blocks, page_bytes]: [H, N, 2*D]."""
        k, v = self.elements(layer, blocks)
        return torch.cat([k, v], dim=-1).reshape(blocks.numel(), -1).view(torch.uint8)

    def shuffled(self, layer: int, blocks: torch.Tensor) -> torch.Tensor:
        """uint8 [blocks, page_bytes]: K [H, D/8, N, 8], then V [H, N/8, D, 8]."""
        k, v = self.elements(layer, blocks)
        pages, heads, tokens, head_dim = k.shape
        k = k.reshape(pages, heads, tokens, head_dim // 8, 8).permute(0, 1, 3, 2, 4)
        v = v.reshape(pages, heads, tokens // 8, 8, head_dim).permute(0, 1, 2, 4, 3)
        planes = [k.reshape(pages, -1), v.reshape(pages, -1)]
        return torch.cat(planes, dim=1).contiguous().view(torch.uint8)


def main() -> None:
    shape = CudaShape(**json.loads(sys.argv[1]))
    device = torch.device("cuda", shape.device)
    layer_bytes = shape.blocks * shape.page_bytes
    every_block = torch.arange(shape.blocks, device=device)
    regions, memories = [], []
    for first in range(0, shape.layers, shape.layers_per_allocation):
        layers = range(first, min(first + shape.layers_per_allocation, shape.layers))
        num_bytes = shape.gap_bytes + len(layers) * (layer_bytes + shape.gap_bytes)
        memory = torch.full((num_bytes,), POISON, dtype=torch.uint8, device=device)
        memories.append(memory)
        at = shape.gap_bytes
        for layer in layers:
            memory[at : at + layer_bytes] = shape.standard(layer, every_block).view(-1)
            regions.append(
                Region(
                    memory.data_ptr() + at,
                    shape.blocks,
                    shape.page_bytes,
                    shape.page_bytes,
                    format=shape.formats()[0],
                    planes=[0],
                    layers=[f"layer.{layer}"],
                    memory="vram",
                    device=shape.device,
                )
            )
            at += layer_bytes + shape.gap_bytes
    before = [memory.clone() for memory in memories]
    torch.cuda.synchronize(device)
    came: list[bytes] = []
    agent = nixl_agent(shape, memories) if shape.nixl else None

    def notices() -> int:
        if agent is not None:
            came.extend(text for texts in agent.notices().values() for text in texts)
        return len(came)

    with Exporter(regions) as exporter:
        metadata = b"" if agent is None else agent.metadata()
        description = EngineDescription(facts(), regions)
        serve(
            wire.Handshake("prefill", description, metadata, exporter.part),
            exporter,
            unchanged=lambda: all(map(torch.equal, memories, before)),
            notices=notices,
        )


def nixl_agent(shape: CudaShape, memories: list[torch.Tensor]) -> Agent:
    """An agent with which the cache is registered."""
    from kvpd.nixl import Agent, MemoryRange

    torch.cuda.set_device(shape.device)
    agent = Agent.create(f"cuda-prefill-{time.time_ns()}")
    agent.register(
        MemoryRange(memory.data_ptr(), memory.numel(), "vram", shape.device) for memory in memories
    )
    return agent


if __name__ == "__main__":
    main()
