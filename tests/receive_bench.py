"""A prefill and a decoder in one process, with real NIXL between them and a fake that withholds."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvpd import wire
from kvpd.cli.demo.decode import DecodeCache
from kvpd.cli.demo.oracle import compare
from kvpd.cli.demo.scenario import DECODE_POISON, Scenario
from kvpd.nixl import Agent, Registration
from kvpd.receive import Receiver
from kvpd.request import Failed, Outcome
from tests.fake_agent import FakeHoldingAgent, FakeHoldingQueue

SCENARIO = Scenario(layers=2, heads=2, tokens=16, head_dim=16, blocks=6, requests=3)
A, B, C = SCENARIO.request_ids()
PLACEMENTS = ("in_place", "staged")


@dataclass
class Bench:
    """A prefill and a decoder in one process, each with a NIXL agent of its own."""

    scenario: Scenario
    placement: str
    agent: FakeHoldingAgent
    prefill: Agent
    registration: Registration
    memory: Any
    cache: DecodeCache
    receiver: Receiver
    queue: FakeHoldingQueue
    handshake: wire.Handshake
    now: float = 100.0
    ended: list[Outcome] = field(default_factory=list)

    def start(self, request_id: str, peer: Any, **more: Any) -> None:
        local, remote = self.scenario.decode_ids(), self.scenario.prefill_ids()
        self.receiver.start(request_id, peer, local[request_id], remote[request_id], **more)

    def poll(self, times: int = 3) -> list[Outcome]:
        """Poll a few times; nothing that is held may end however often one asks."""
        fresh = [outcome for _ in range(times) for outcome in self.receiver.poll()]
        self.ended += fresh
        return fresh

    def until(self, condition: Callable[[], bool]) -> list[Outcome]:
        """Poll until something is so; a minute is far more than any of this takes."""
        fresh: list[Outcome] = []
        give_up_at = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < give_up_at, "it never came to that"
            time.sleep(1e-4)  # NIXL's own threads need a core as well
            fresh += self.poll(1)
        return fresh

    def run(self) -> list[Outcome]:
        """Poll until every request has ended."""
        return self.until(lambda: not self.receiver.num_live) + self.poll(1)

    def check(self, *ready: str) -> None:
        """The whole cache: pages of these requests, and poison in every other byte."""
        ids = {name: ids for name, ids in self.scenario.decode_ids().items() if name in ready}
        comparison = compare(self.cache.tensor.numpy(), self.scenario, ids)
        assert comparison.holds, comparison.first_wrong

    def poison(self, block: int) -> None:
        """Undo whatever was written into a block, in every layer."""
        cache = self.cache.tensor.numpy()
        for region in self.cache.description.regions:
            first = region.block_address(block) - self.cache.tensor.data_ptr()
            cache[first : first + region.block_bytes] = DECODE_POISON

    def notices(self) -> list[bytes]:
        return [text for texts in self.prefill.notices().values() for text in texts]


Maker = Callable[..., Bench]


def failure(outcome: Outcome) -> tuple[str, str, tuple[int, ...]]:
    assert isinstance(outcome, Failed), outcome
    assert outcome.reason
    return outcome.request_id, outcome.code, tuple(sorted(outcome.invalid_blocks))


def blocks_of(*request_ids: str) -> tuple[int, ...]:
    return tuple(sorted(itertools.chain(*(SCENARIO.decode_ids()[name] for name in request_ids))))
