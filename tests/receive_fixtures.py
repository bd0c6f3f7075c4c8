"""The fixtures of the receiver's tests; a pytest plugin that test modules name."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

import kvpd.receive
from kvpd import LinkModel, slab_bytes, wire
from kvpd.cli.demo.decode import DecodeCache
from kvpd.cli.demo.prefill import handshakes, written_memory
from kvpd.cli.demo.scenario import Scenario
from kvpd.nixl import Agent, MemoryRange
from kvpd.receive import Receiver
from tests.fake_agent import FakeHoldingAgent, FakeHoldingQueue
from tests.receive_bench import PLACEMENTS, SCENARIO, Bench, Maker

# A link on which chunks cost so much that the planner makes as few as there can be.
FEW_CHUNKS = LinkModel("dram", seconds_per_chunk=1.0)


@pytest.fixture(params=PLACEMENTS)
def placement(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def agents() -> Iterator[tuple[Agent, Agent]]:
    """One prefill agent and one decode agent: each keeps a thread busy as long as it lives."""
    pair = (
        Agent.create(f"test-prefill-{time.time_ns()}"),
        Agent.create(f"test-decode-{time.time_ns()}"),
    )
    yield pair
    for agent in pair:
        agent.close()


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, agents: tuple[Agent, Agent]) -> Iterator[Maker]:
    """Build benches; whatever they hold is let go in the end."""
    benches: list[Bench] = []
    prefill, decode = agents

    def build(placement: str, scenario: Scenario = SCENARIO, **more: Any) -> Bench:
        queues: list[FakeHoldingQueue] = []

        def queue(device: Any) -> FakeHoldingQueue:
            queues.append(FakeHoldingQueue(device))
            return queues[-1]

        monkeypatch.setattr(kvpd.receive, "ConversionQueue", queue)
        memory = written_memory(scenario)
        registration = prefill.register([MemoryRange(int(memory.ctypes.data), memory.size)])
        blob = handshakes(scenario, int(memory.ctypes.data), prefill.metadata())["standard"]
        handshake = wire.decode(blob)
        assert handshake is not None
        cache = DecodeCache(scenario)
        agent = FakeHoldingAgent(decode._native)
        agent.register([MemoryRange.of(region) for region in cache.description.regions])
        # One slot for one chunk with two pages of all layers: chunks are taken in turns.
        slab_pages = more.pop("slab_pages", 2)
        options: dict[str, Any] = {
            "convert": True,
            "placement": placement,
            "slab_bytes": slab_bytes(cache.description.regions, num_pages=slab_pages),
            "num_slots": 1,
            "link": FEW_CHUNKS,
        }
        bench: Bench
        receiver = Receiver(
            agent,
            cache.description,
            [cache.tensor],
            **{**options, **more},
            clock=lambda: bench.now,
        )
        bench = Bench(
            scenario, placement, agent, prefill, registration, memory, cache, receiver,
            queues[-1] if queues else FakeHoldingQueue("cpu"), handshake,
        )  # fmt: skip
        benches.append(bench)
        return bench

    yield build
    for bench in benches:
        bench.agent.holds = bench.agent.refuses_release = bench.agent.fails = False
        bench.queue.holds, bench.queue.breaks = False, None
        bench.receiver.close()
        slab = bench.receiver._slab
        if slab is not None and slab.lost:
            slab.close(bench.agent)  # kept by the receiver: something may still read it
        assert (bench.agent.peers, bench.agent.rows) == ([], [])
        (caches,) = bench.agent.registrations  # the cache's own; the slab is gone
        bench.agent.deregister(caches)
        bench.prefill.deregister(bench.registration)
        bench.notices()
