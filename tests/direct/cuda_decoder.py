"""A decoder's cache on a GPU, in poison and guards, and what it must hold, written without kvpd."""

from __future__ import annotations

import torch

from kvpd import EngineDescription, cache_regions
from kvpd.convert import Pages
from tests.direct.cuda_prefill import POISON, CudaShape
from tests.engine_builder import facts

GUARD_BYTES = 1 << 16


class CudaDecoder:
    """Shuffled pages, K and V planes apart (`converts`), or standard pages, of `shape`'s extents.

    Attributes:
        memory: uint8, all of it, guards included.
        description: the cache for a receiver.
        pages: the cache for a conversion.
    """

    def __init__(self, shape: CudaShape, device: torch.device, *, converts: bool) -> None:
        standard, shuffled = shape.formats()
        self.shape, self.device, self.converts = shape, device, converts
        pieces = 2 if converts else 1
        num_bytes = shape.layers * shape.blocks * shape.page_bytes
        self.memory = torch.full(
            (num_bytes + 2 * GUARD_BYTES,), POISON, dtype=torch.uint8, device=device
        )
        self._expected = self.memory.clone()
        # READs are ordered with no stream: one could end before the poison is written.
        torch.cuda.synchronize(device)
        extents = (shape.layers, pieces, shape.blocks, shape.page_bytes // pieces)
        self._image = self._expected[GUARD_BYTES:-GUARD_BYTES].view(extents)
        layout = "LHBNC" if converts else "LBHNC"
        regions = cache_regions(
            shuffled if converts else standard,
            layout,
            address=self.memory.data_ptr() + GUARD_BYTES,
            num_blocks=shape.blocks,
            layers=[f"layer.{layer}" for layer in range(shape.layers)],
            memory="vram",
            device=device.index,
        )
        self.description = EngineDescription(facts(layout=layout), regions)
        self.pages = Pages.of(shuffled if converts else standard, regions, [self.memory])

    def expect(self, theirs: torch.Tensor, ours: torch.Tensor) -> None:
        """Block theirs[i] of the prefill belongs into our block ours[i]."""
        write = self.shape.shuffled if self.converts else self.shape.standard
        for layer in range(self.shape.layers):
            pages = write(layer, theirs)
            for piece, half in enumerate(pages.chunk(self._image.shape[1], dim=1)):
                self._image[layer, piece, ours.long()] = half

    def ignore(self, ours: torch.Tensor) -> None:
        """These blocks may hold anything: a request for them failed."""
        torch.cuda.synchronize(self.device)
        held = self.memory[GUARD_BYTES:-GUARD_BYTES].view(self._image.shape)
        self._image[:, :, ours.long()] = held[:, :, ours.long()]

    def holds(self) -> bool:
        """Whether every byte is as expected."""
        torch.cuda.synchronize(self.device)
        return torch.equal(self.memory, self._expected)
