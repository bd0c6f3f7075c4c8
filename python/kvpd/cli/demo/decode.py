"""The decoder's side: its own cache, the handshake, the requests, and the check of every byte."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from socket import socketpair
from typing import cast

import torch

from kvpd import wire
from kvpd._kvpd import EngineDescription, PageFormat, Reason, Region, slab_bytes
from kvpd.cli.demo.channel import Channel
from kvpd.cli.demo.facts import engine_facts
from kvpd.cli.demo.oracle import DecodeMap, compare
from kvpd.cli.demo.result import REFUSALS, DemoResult, PlacementResult, Refusal
from kvpd.cli.demo.scenario import DECODE_POISON, Scenario
from kvpd.errors import RefusedError, TransferError
from kvpd.nixl import Agent, MemoryRange
from kvpd.receive import PlacementChoice, Receiver
from kvpd.request import Outcome

Advance = Callable[[], None]

# Short beside any READ, long enough that NIXL's own threads get a core on a small machine.
_POLL_SECONDS = 50e-6


class DecodeCache:
    """Shuffled pages in LHBNC, guards around every plane, poison everywhere."""

    def __init__(self, scenario: Scenario) -> None:
        where = DecodeMap(scenario)
        self.format = PageFormat.aiter_shuffle(
            heads=scenario.heads,
            tokens=scenario.tokens,
            head_dim=scenario.head_dim,
            dtype=scenario.dtype,
        )
        self.tensor = torch.full((where.num_bytes,), DECODE_POISON, dtype=torch.uint8)
        regions = [
            Region(
                self.tensor.data_ptr() + where.start(layer, plane),
                scenario.decode_blocks,
                where.plane_bytes,
                where.plane_bytes,
                format=self.format,
                planes=[plane],
                layers=[name],
            )
            for layer, name in enumerate(scenario.layer_names)
            for plane in range(2)
        ]
        self.description = EngineDescription(
            engine_facts(scenario, "LHBNC", "demo-shuffle"), regions
        )


def run_demo(
    scenario: Scenario,
    placements: tuple[PlacementChoice, ...],
    *,
    timeout_seconds: float,
    advance: Advance,
) -> DemoResult:
    """Run both processes.

    Args:
        scenario: shape, requests, seed.
        placements: passes to make, each into a fresh cache.
        timeout_seconds: how long any single wait may take.
        advance: called after each of `num_steps` steps.

    Raises:
        KvpdError: something could not be set up or took too long.
    """
    # NIXL's progress threads keep cores busy; torch's workers would spin waiting for each other.
    torch.set_num_threads(1)
    # Before the prefill starts: what is missing here is said by this process, not by a dead child.
    agent = Agent.create(f"demo-decode-{time.time_ns()}")
    with _prefill_process(timeout_seconds) as channel:
        channel.send_json(scenario.to_json())
        hello = channel.receive_json()
        offers = {name: channel.receive() for name in hello["offers"]}
        prefill_ids = channel.receive_json()
        advance()
        handshake = wire.decode(offers["standard"])
        if handshake is None or handshake.description.format is None:
            raise TransferError("the prefill sent no tag", code="untagged-peer", field="kvpd")
        cache = DecodeCache(scenario)
        refusals = tuple(_refusals(agent, cache, offers, hello["agent"]))
        advance()
        passes = []
        for placement in placements:
            passes.append(
                _run_placement(
                    scenario, placement, agent, handshake, prefill_ids, channel, timeout_seconds
                )
            )
            advance()
        agent.close()
    return DemoResult(
        scenario=scenario,
        prefill_pid=int(hello["pid"]),
        prefill_format=handshake.description.format,
        decode_format=cache.format,
        placements=tuple(passes),
        refusals=refusals,
    )


def num_steps(placements: tuple[PlacementChoice, ...]) -> int:
    """How often `run_demo` advances."""
    return 2 + len(placements)


def _run_placement(
    scenario: Scenario,
    placement: PlacementChoice,
    agent: Agent,
    handshake: wire.Handshake,
    prefill_ids: dict[str, list[int]],
    channel: Channel,
    timeout_seconds: float,
) -> PlacementResult:
    cache = DecodeCache(scenario)
    registration = agent.register([MemoryRange.of(r) for r in cache.description.regions])
    local_ids = scenario.decode_ids()
    receiver = Receiver(
        agent,
        cache.description,
        [cache.tensor],
        convert=True,
        placement=placement,
        slab_bytes=slab_bytes(
            cache.description.regions, num_pages=max(len(ids) for ids in local_ids.values())
        ),
    )
    peer = receiver.add_peer(handshake)
    outcomes: list[Outcome] = []
    num_alone = scenario.requests // 2
    started_at = time.monotonic()
    for position, (request_id, ids) in enumerate(local_ids.items()):
        notice = f"{placement}/{request_id}".encode()
        receiver.start(request_id, peer, ids, prefill_ids[request_id], notice=notice)
        if position < num_alone:
            outcomes += _until_ended(receiver, timeout_seconds)
    outcomes += _until_ended(receiver, timeout_seconds)
    wall_seconds = time.monotonic() - started_at
    expected = tuple(f"{placement}/{request_id}" for request_id in local_ids)
    channel.send_json(expected)
    report = channel.receive_json()
    receiver.close()
    agent.deregister(registration)
    return PlacementResult(
        placement=placement,
        verdict=peer.verdict,
        outcomes=tuple(sorted(outcomes, key=lambda outcome: outcome.request_id)),
        num_alone=num_alone,
        wall_seconds=wall_seconds,
        notices=tuple(report["notices"]),
        expected_notices=expected,
        prefill_unchanged=bool(report["unchanged"]),
        comparison=compare(cache.tensor.numpy(), scenario, local_ids),
    )


def _until_ended(receiver: Receiver, timeout_seconds: float) -> list[Outcome]:
    give_up_at = time.monotonic() + timeout_seconds
    outcomes = receiver.poll()
    while receiver.num_live:
        if time.monotonic() > give_up_at:
            raise TransferError(
                f"{receiver.num_live} requests took over {timeout_seconds} s", code="timeout"
            )
        time.sleep(_POLL_SECONDS)
        outcomes += receiver.poll()
    return outcomes


def _refusals(
    agent: Agent, cache: DecodeCache, offers: dict[str, bytes], prefill_agent: str
) -> Iterator[Refusal]:
    """Offer every pair that must be refused to a receiver, over the same wire.

    Before any pair is accepted: `agent` must not know the prefill yet.
    """
    for name, expected_code in REFUSALS.items():
        blob = offers.get(name, offers["standard"])
        receiver = Receiver(
            agent, cache.description, [cache.tensor], convert=name != "conversion off"
        )
        handshake = wire.decode(blob)
        reasons: tuple[Reason, ...] = ()
        try:
            receiver.add_peer(handshake)
        except RefusedError as error:
            reasons = error.verdict.reasons
        was_registered = agent.knows_peer(prefill_agent)
        receiver.close()
        yield Refusal(name, expected_code, reasons, was_registered)


@contextmanager
def _prefill_process(timeout_seconds: float) -> Iterator[Channel]:
    ours, theirs = socketpair()
    command = [sys.executable, "-m", "kvpd.cli.demo.prefill", str(theirs.fileno())]
    process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
    theirs.close()
    channel = Channel(ours, timeout_seconds)
    try:
        yield channel
    finally:
        channel.close()  # ends the prefill's loop
        try:
            # It has said all it had to say: its teardown is not worth a wait on a busy machine.
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def placements_of(choice: str) -> tuple[PlacementChoice, ...]:
    """The passes behind ``--placement``."""
    return ("in_place", "staged") if choice == "both" else (cast(PlacementChoice, choice),)
