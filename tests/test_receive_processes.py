"""The receiver against a prefill in another process: the real thing, one killed, one stopped."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("nixl")

from kvpd import PlanError, slab_bytes, wire
from kvpd.cli.demo.channel import Channel
from kvpd.cli.demo.decode import DecodeCache
from kvpd.cli.demo.oracle import compare
from kvpd.cli.demo.scenario import DECODE_POISON, Scenario
from kvpd.nixl import Agent, MemoryRange, Registration
from kvpd.receive import Receiver
from kvpd.request import Failed, Outcome, Ready

SCENARIO = Scenario(layers=2, heads=2, tokens=16, head_dim=16, blocks=6, requests=2)
FIRST, SECOND = SCENARIO.request_ids()


@dataclass
class Prefill:
    """The other process and what it offered."""

    process: subprocess.Popen[bytes]
    channel: Channel
    handshake: wire.Handshake
    ids: dict[str, list[int]]


@pytest.fixture
def over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped process answers nothing; other transports read its memory without it."""
    monkeypatch.setenv("UCX_TLS", "tcp")


@pytest.fixture
def prefill() -> Iterator[Prefill]:
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "kvpd.cli.demo.prefill", str(theirs.fileno())]
    process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
    theirs.close()
    channel = Channel(ours, timeout_seconds=60)
    channel.send_json(SCENARIO.to_json())
    offers = {name: channel.receive() for name in channel.receive_json()["offers"]}
    handshake = wire.decode(offers["standard"])
    assert handshake is not None
    yield Prefill(process, channel, handshake, channel.receive_json())
    channel.close()
    process.kill()
    process.wait()


def decoder(
    placement: Any, clock: Callable[[], float] = time.monotonic
) -> tuple[DecodeCache, Agent, Registration, Receiver]:
    cache = DecodeCache(SCENARIO)
    agent = Agent.create(f"test-decode-{time.time_ns()}")
    registration = agent.register([MemoryRange.of(r) for r in cache.description.regions])
    receiver = Receiver(
        agent,
        cache.description,
        [cache.tensor],
        convert=True,
        placement=placement,
        slab_bytes=slab_bytes(cache.description.regions, num_pages=3),
        clock=clock,
    )
    return cache, agent, registration, receiver


def finish(receiver: Receiver) -> list[Outcome]:
    outcomes: list[Outcome] = []
    give_up_at = time.monotonic() + 60
    while receiver.num_live and time.monotonic() < give_up_at:
        outcomes += receiver.poll()
    return outcomes + receiver.poll()


@pytest.mark.parametrize("placement", ["in_place", "staged"])
def test_a_prefill_that_is_killed_between_two_requests(prefill: Prefill, placement: Any) -> None:
    local = SCENARIO.decode_ids()
    cache, agent, registration, receiver = decoder(placement)
    peer = receiver.add_peer(prefill.handshake)
    receiver.start(FIRST, peer, local[FIRST], prefill.ids[FIRST])
    (outcome,) = finish(receiver)
    assert isinstance(outcome, Ready) and outcome.notice_error == ""
    prefill.channel.send_json([FIRST])
    assert prefill.channel.receive_json() == {"notices": [FIRST], "unchanged": True}

    prefill.process.kill()
    prefill.process.wait()
    receiver.start(SECOND, peer, local[SECOND], prefill.ids[SECOND])
    (outcome,) = finish(receiver)
    assert isinstance(outcome, Failed)
    assert outcome.code == "read-failed" and outcome.reason
    assert sorted(outcome.invalid_blocks) == sorted(local[SECOND])
    # What was ready stays right; nothing of the second request was converted.
    comparison = compare(cache.tensor.numpy(), SCENARIO, {FIRST: local[FIRST]})
    assert comparison.holds, comparison.first_wrong
    receiver.close()
    agent.deregister(registration)
    agent.close()


@pytest.mark.parametrize("placement", ["in_place", "staged"])
def test_a_prefill_that_stands_still_keeps_the_blocks_of_a_late_request(
    over_tcp: None, prefill: Prefill, placement: Any
) -> None:
    """Its READ cannot be stopped: given back, the blocks would be written when it goes on."""
    local, now = SCENARIO.decode_ids(), [0.0]
    cache, agent, registration, receiver = decoder(placement, lambda: now[0])
    peer = receiver.add_peer(prefill.handshake)
    receiver.start(FIRST, peer, local[FIRST], prefill.ids[FIRST])
    assert isinstance(finish(receiver)[0], Ready)
    os.kill(prefill.process.pid, signal.SIGSTOP)
    os.waitpid(prefill.process.pid, os.WUNTRACED)  # until all of its threads stand
    receiver.start(SECOND, peer, local[SECOND], prefill.ids[SECOND], deadline=1.0)
    now[0] = 2.0
    for _ in range(100):
        assert receiver.poll() == []
        time.sleep(0.002)
    with pytest.raises(PlanError) as caught:
        receiver.start("next", peer, local[SECOND], prefill.ids[SECOND])
    assert caught.value.code == "blocks-in-flight"

    os.kill(prefill.process.pid, signal.SIGCONT)
    (outcome,) = finish(receiver)
    assert isinstance(outcome, Failed) and outcome.code == "deadline-passed"
    memory = cache.tensor.numpy()
    memory[:] = DECODE_POISON  # somebody else's from here on
    until = time.monotonic() + 0.3
    while time.monotonic() < until:
        receiver.poll()
    assert (memory == DECODE_POISON).all()
    receiver.close()
    agent.deregister(registration)
    agent.close()
