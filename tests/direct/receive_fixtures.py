"""The fixtures of the tests of direct reads; a pytest plugin that test modules name."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

import kvpd.receive
from kvpd.cli.demo.decode import DecodeCache
from kvpd.direct import mapping as direct_mapping
from kvpd.nixl import Agent, MemoryRange
from kvpd.receive import Receiver
from tests.direct.decoder import Decoder, FakeGpuAgent, Maker, standard_cache
from tests.direct.fake_driver import FakeDriver
from tests.direct.prefill import Prefill, running
from tests.fake_agent import FakeHoldingQueue
from tests.receive_bench import SCENARIO


@pytest.fixture(scope="module")
def shared_prefill() -> Iterator[Prefill]:
    """For all tests that leave it as it was: it takes seconds to start."""
    with running(SCENARIO, "tests.direct.nixl_prefill") as process:
        yield process


@pytest.fixture
def own_prefill() -> Iterator[Prefill]:
    """For a test that does it harm."""
    with running(SCENARIO, "tests.direct.nixl_prefill") as process:
        yield process
        process.kill()


@pytest.fixture(scope="module")
def direct_agent() -> Iterator[Agent]:
    agent = Agent.create(f"direct-decode-{time.time_ns()}")
    yield agent
    agent.close()


@pytest.fixture
def make_direct(monkeypatch: pytest.MonkeyPatch, direct_agent: Agent) -> Iterator[Maker]:
    """Build decoders; at the end everything is let go, and nothing may still be mapped."""
    made: list[Decoder] = []

    def build(
        prefill: Prefill, driver: FakeDriver | None = None, *, equal: bool = False, **options: Any
    ) -> Decoder:
        driver = FakeDriver() if driver is None else driver
        monkeypatch.setattr(direct_mapping, "load_driver", lambda: driver)
        queues: list[FakeHoldingQueue] = []

        def queue(device: Any) -> FakeHoldingQueue:
            queues.append(FakeHoldingQueue(device))
            return queues[-1]

        monkeypatch.setattr(kvpd.receive, "ConversionQueue", queue)
        cache = None if equal else DecodeCache(SCENARIO)
        tensor, description = (
            standard_cache() if cache is None else (cache.tensor, cache.description)
        )
        agent = FakeGpuAgent(direct_agent._native)
        registration = agent.register([MemoryRange.of(region) for region in description.regions])
        receiver = Receiver(
            agent,
            description,
            [tensor],
            **{"convert": not equal, "direct": True, **options},
            clock=lambda: decoder.now,
        )
        decoder = Decoder(prefill, driver, agent, queues[-1], tensor, receiver, cache, registration)
        made.append(decoder)
        return decoder

    yield build
    for decoder in made:
        decoder.queue.holds, decoder.queue.breaks = False, None
        decoder.receiver.close()
        assert (decoder.agent.peers, decoder.agent.rows) == ([], [])
        decoder.agent.deregister(decoder.registration)
