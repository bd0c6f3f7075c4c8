"""The slab: registered memory where raw pages land before they are converted into the cache."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import torch

from kvpd._kvpd import Region, slab_bytes, slab_regions
from kvpd.nixl import Agent, MemoryRange

if TYPE_CHECKING:
    from kvpd.words import Memory


def memory_of(device: torch.device) -> tuple[Memory, int]:
    """NIXL's memory kind and device number of a torch device."""
    return ("dram", 0) if device.type == "cpu" else ("vram", device.index or 0)


class Slab:
    """One slab for one request at a time, in the order in which they asked.

    The first in the queue owns the slab until it leaves. It must not leave before its READ's handle
    was released and its conversion has completed, or the next request's pages are overwritten.

    Args:
        agent: registers the memory.
        regions: the cache's regions; the slab holds `num_pages` raw pages of all their layers.
        num_pages: capacity in pages of the local format.
        device: where the cache is.

    Raises:
        TransferError: the memory cannot be registered.
    """

    def __init__(
        self, agent: Agent, regions: tuple[Region, ...], num_pages: int, device: torch.device
    ) -> None:
        num_bytes = slab_bytes(regions, num_pages=num_pages)
        self.tensor = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self.lost = ""
        self._memory, self._device = memory_of(device)
        address = self.tensor.data_ptr()
        self._registration = agent.register(
            [MemoryRange(address, num_bytes, self._memory, self._device)]
        )
        self._queue: deque[str] = deque()

    def num_pages(self, source: list[Region]) -> int:
        """How many pages of a peer's layers fit."""
        return int(self.tensor.numel()) // slab_bytes(source, num_pages=1)

    def regions(self, source: list[Region]) -> tuple[Region, ...]:
        """The slab seen as pages of a peer's format, one dense region per layer."""
        return slab_regions(
            source,
            address=self.tensor.data_ptr(),
            num_pages=self.num_pages(source),
            memory=self._memory,
            device=self._device,
        )

    def enqueue(self, request_id: str) -> None:
        """Ask for the slab."""
        self._queue.append(request_id)

    def is_owned_by(self, request_id: str) -> bool:
        """Whether it is this request's turn."""
        return bool(self._queue) and self._queue[0] == request_id

    def leave(self, request_id: str) -> None:
        """Give the slab, or the place in the queue, back."""
        self._queue.remove(request_id)

    def lose(self, reason: str) -> None:
        """Give the slab up for good: whether something still uses it cannot be told any more.

        Requests that find `lost` set fail instead of taking their turn.
        """
        self.lost = reason

    def close(self, agent: Agent) -> None:
        """Deregister the memory. Raises `TransferError`."""
        agent.deregister(self._registration)
