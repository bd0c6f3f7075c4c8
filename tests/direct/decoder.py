"""A decoder that reads the memory of a prefill in another process directly; NIXL is real.

The GPU's driver is a fake over shared memory, so the conversion reads the prefill's own bytes. What
the caches must hold comes from the demo's oracle.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from kvpd import EngineDescription, PageFormat, cache_regions
from kvpd.cli.demo.decode import DecodeCache
from kvpd.cli.demo.facts import engine_facts
from kvpd.cli.demo.oracle import compare
from kvpd.cli.demo.scenario import DECODE_POISON
from kvpd.nixl import AgentName, Registration, Rows
from kvpd.peer import Peer
from kvpd.receive import Receiver
from kvpd.request import Outcome
from tests.direct.fake_driver import FakeDriver
from tests.direct.prefill import Prefill
from tests.fake_agent import FakeHoldingAgent, FakeHoldingQueue
from tests.receive_bench import SCENARIO
from tests.waiting import eventually


class FakeGpuAgent(FakeHoldingAgent):
    """Before a real agent: the memory of the fake GPU is the host's, and NIXL is told so."""

    def prepare_remote(self, peer: AgentName, rows: Any, memory: Any) -> Rows:
        return super().prepare_remote(peer, rows, "dram")


@dataclass
class Decoder:
    """A decoder, and the prefill that it reads."""

    prefill: Prefill
    driver: FakeDriver
    agent: FakeGpuAgent
    queue: FakeHoldingQueue
    tensor: torch.Tensor
    receiver: Receiver
    cache: DecodeCache | None
    registration: Registration
    now: float = 100.0
    ended: list[Outcome] = field(default_factory=list)

    def add_peer(self, **more: Any) -> Peer:
        return self.receiver.add_peer(self.prefill.handshake, **more)

    def start(self, request_id: str, peer: Peer, **more: Any) -> None:
        local, remote = SCENARIO.decode_ids(), SCENARIO.prefill_ids()
        self.receiver.start(request_id, peer, local[request_id], remote[request_id], **more)

    def poll(self, times: int = 3) -> list[Outcome]:
        return [outcome for _ in range(times) for outcome in self.receiver.poll()]

    def run(self) -> list[Outcome]:
        """Poll until every request has ended."""
        outcomes: list[Outcome] = []

        def ended() -> bool:
            outcomes.extend(self.poll(1))
            return not self.receiver.num_live

        assert eventually(ended)
        return outcomes + self.poll(1)

    def check(self, *ready: str) -> None:
        """The whole cache: pages of these requests, and poison in every other byte."""
        assert self.cache is not None
        ids = {name: ids for name, ids in SCENARIO.decode_ids().items() if name in ready}
        comparison = compare(self.cache.tensor.numpy(), SCENARIO, ids)
        assert comparison.holds, comparison.first_wrong


def standard_cache() -> tuple[torch.Tensor, EngineDescription]:
    """A decoder's cache in the prefill's own format, poisoned."""
    format = PageFormat.standard(
        heads=SCENARIO.heads,
        tokens=SCENARIO.tokens,
        head_dim=SCENARIO.head_dim,
        dtype=SCENARIO.dtype,
    )
    num_bytes = SCENARIO.layers * SCENARIO.decode_blocks * format.page_bytes
    tensor = torch.full((num_bytes,), DECODE_POISON, dtype=torch.uint8)
    regions = cache_regions(
        format,
        "LBHNC",
        address=tensor.data_ptr(),
        num_blocks=SCENARIO.decode_blocks,
        layers=SCENARIO.layer_names,
    )
    return tensor, EngineDescription(engine_facts(SCENARIO, "LBHNC", "demo-standard"), regions)


def unmapped(decoder: Decoder) -> bool:
    return decoder.driver.num_open == 0 and decoder.prefill.ask("mapped") == 0


Maker = Callable[..., Decoder]
