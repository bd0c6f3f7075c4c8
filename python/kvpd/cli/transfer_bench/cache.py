"""The two caches: memory with guards around it, and what is published of it."""

from __future__ import annotations

import torch

from kvpd._kvpd import EngineDescription, PageFormat, Region, cache_regions
from kvpd.cli.transfer_bench.content import all_standard_pages, shuffled_planes, standard_pages
from kvpd.cli.transfer_bench.patterns import Request
from kvpd.cli.transfer_bench.scenario import Scenario
from kvpd.nixl import Agent, MemoryRange, Registration
from kvpd.staging import memory_of

GUARD_BYTES = 1 << 16
POISON = 0xA5
_COMPARE_BYTES = 1 << 30


class Cache:
    """One allocation with guards before and behind it, poisoned."""

    def __init__(self, scenario: Scenario, device: str) -> None:
        self.scenario = scenario
        self.device = torch.device(device)
        num_bytes = scenario.cache_bytes + 2 * GUARD_BYTES
        self.memory = torch.full((num_bytes,), POISON, dtype=torch.uint8, device=self.device)

    @property
    def address(self) -> int:
        """First byte of the cache."""
        return self.memory.data_ptr() + GUARD_BYTES

    @property
    def inner(self) -> torch.Tensor:
        """The cache's bytes, without guards."""
        return self.memory[GUARD_BYTES : GUARD_BYTES + self.scenario.cache_bytes]

    def regions(self, format: PageFormat, layout: str) -> tuple[Region, ...]:
        """The cache as pages of a format."""
        memory, device = memory_of(self.device)
        return cache_regions(
            format,
            layout,
            address=self.address,
            num_blocks=self.scenario.num_blocks,
            layers=self.scenario.layer_names,
            memory=memory,
            device=device,
        )

    def description(self, format: PageFormat, layout: str) -> EngineDescription:
        """What a side publishes."""
        return EngineDescription(self.scenario.facts(layout), self.regions(format, layout))

    def register(self, agent: Agent) -> Registration:
        """Register the cache, guards excluded."""
        memory, device = memory_of(self.device)
        return agent.register(
            [MemoryRange(self.address, self.scenario.cache_bytes, memory, device)]
        )

    def poison(self) -> None:
        """Forget everything, before whatever is called next."""
        self.memory.fill_(POISON)
        if self.device.type == "cuda":
            # NIXL's READs are ordered with no stream: one could end before the poison is written.
            torch.cuda.synchronize(self.device)

    def write_prefill(self) -> None:
        """Fill the cache with the prefill's pages."""
        s = self.scenario
        pages = self.inner.view(s.layers, s.num_blocks, s.page_bytes)
        for layer, blocks, expected in all_standard_pages(s, self.device):
            pages[layer, blocks] = expected

    def is_prefill(self) -> bool:
        """Whether it still holds exactly the prefill's pages."""
        s = self.scenario
        pages = self.inner.view(s.layers, s.num_blocks, s.page_bytes)
        return all(
            torch.equal(pages[layer, blocks], expected)
            for layer, blocks, expected in all_standard_pages(s, self.device)
        )

    def holds_exactly(self, requests: list[Request], *, converted: bool) -> bool:
        """Whether the requests' pages are right, and nothing else was written.

        The cache is poisoned afterwards.
        """
        right = True
        s = self.scenario
        for local_ids, remote_ids in requests:
            ours = torch.from_numpy(local_ids).to(self.device, torch.int64)
            theirs = torch.from_numpy(remote_ids).to(self.device, torch.int64)
            for layer in range(s.layers):
                if converted:
                    planes = self.inner.view(s.layers, 2, s.num_blocks, s.page_bytes // 2)[layer]
                    expected = shuffled_planes(s, layer, theirs)
                    for plane, values in zip(planes, expected, strict=True):
                        right &= torch.equal(plane[ours], values)
                        plane[ours] = POISON
                else:
                    pages = self.inner.view(s.layers, s.num_blocks, s.page_bytes)[layer]
                    right &= torch.equal(pages[ours], standard_pages(s, layer, theirs))
                    pages[ours] = POISON
        # In pieces: the comparison's result is as large as the memory.
        right &= all(
            bool((piece == POISON).all()) for piece in torch.split(self.memory, _COMPARE_BYTES)
        )
        self.poison()
        return right
