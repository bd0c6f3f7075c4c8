"""The receiver reading a peer's memory directly: the prefill is another process, NIXL is real.

The GPU's driver is a fake over shared memory, so the conversion reads the prefill's own bytes. What
the caches must hold comes from the demo's oracle.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("nixl")

import torch

import kvpd.connect
import kvpd.receive
from kvpd import EngineDescription, PageFormat, cache_regions, slab_bytes
from kvpd.cli.demo.decode import DecodeCache
from kvpd.cli.demo.facts import engine_facts
from kvpd.cli.demo.oracle import compare
from kvpd.cli.demo.prefill import written_memory
from kvpd.cli.demo.scenario import DECODE_POISON
from kvpd.convert import prepare
from kvpd.direct import mapping as direct_mapping
from kvpd.errors import ConversionError, DirectError, PlanError, TransferError
from kvpd.nixl import Agent, MemoryRange, Registration, Rows
from kvpd.peer import Peer
from kvpd.receive import Receiver
from kvpd.request import Failed, Outcome, Ready
from tests.direct.fake_driver import PREFIX, SHARED, UUIDS, FakeDriver
from tests.direct.prefill import Prefill, running
from tests.fake_agent import FakeHoldingAgent, FakeHoldingQueue
from tests.receive_bench import SCENARIO, A, B, C, blocks_of, failure


class FakeGpuAgent(FakeHoldingAgent):
    """Before a real agent: the memory of the fake GPU is the host's, and NIXL is told so."""

    def prepare_remote(self, peer: str, rows: Any, memory: Any) -> Rows:
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


def eventually(holds: Callable[[], Any]) -> bool:
    """Whether it holds within some seconds."""
    give_up_at = time.monotonic() + 30
    while not holds():
        if time.monotonic() > give_up_at:
            return False
        time.sleep(0.001)
    return True


@pytest.fixture(scope="module")
def shared_prefill() -> Iterator[Prefill]:
    """For all tests that leave it as it was: it takes seconds to start."""
    with running(SCENARIO, "tests.direct.nixl_prefill") as process:
        yield process
    for left in SHARED.glob(PREFIX + "*"):
        left.unlink()


@pytest.fixture
def own_prefill() -> Iterator[Prefill]:
    """For a test that does it harm."""
    with running(SCENARIO, "tests.direct.nixl_prefill") as process:
        yield process
        process.kill()


@pytest.fixture(scope="module")
def native() -> Iterator[Agent]:
    agent = Agent.create(f"direct-decode-{time.time_ns()}")
    yield agent
    agent.close()


Maker = Callable[..., Decoder]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, native: Agent) -> Iterator[Maker]:
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
        agent = FakeGpuAgent(native._native)
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


# What is served


def test_pages_come_converted_without_a_read(make: Maker, shared_prefill: Prefill) -> None:
    decoder = make(shared_prefill)
    came = shared_prefill.ask("notices")
    peer = decoder.add_peer(must_be_direct=True)
    assert peer.why_not_direct == "" and decoder.driver.num_open == 1
    for request_id in (A, B, C):
        decoder.start(request_id, peer)
    outcomes = decoder.run()
    assert {outcome.request_id for outcome in outcomes} == {A, B, C}
    for outcome in outcomes:
        assert isinstance(outcome, Ready)
        assert (outcome.placement, outcome.is_converted) == ("direct", True)
        assert outcome.descriptors.planned == 0 and outcome.notice_error == ""
    decoder.check(A, B, C)
    assert decoder.agent.reads == []
    assert sorted(decoder.agent.sent) == sorted(name.encode() for name in (A, B, C))
    assert eventually(lambda: shared_prefill.ask("notices") == came + 3)
    assert shared_prefill.ask("unchanged") == 1
    decoder.receiver.remove_peer(peer)
    assert eventually(lambda: unmapped(decoder))


def test_equal_formats_come_the_same_way(make: Maker, shared_prefill: Prefill) -> None:
    decoder = make(shared_prefill, equal=True)
    peer = decoder.add_peer(must_be_direct=True)
    for request_id in (A, B):
        decoder.start(request_id, peer)
    outcomes = decoder.run()
    assert [(o.placement, o.is_converted) for o in outcomes if isinstance(o, Ready)] == [
        ("direct", False)
    ] * 2
    assert decoder.agent.reads == []
    shape = (SCENARIO.layers, SCENARIO.prefill_blocks, -1)
    sent = written_memory(SCENARIO).reshape(shape)
    expected = np.full(
        (SCENARIO.layers, SCENARIO.decode_blocks, sent.shape[2]), DECODE_POISON, "u1"
    )
    for request_id in (A, B):
        theirs, ours = SCENARIO.prefill_ids()[request_id], SCENARIO.decode_ids()[request_id]
        expected[:, ours] = sent[:, theirs]
    assert np.array_equal(decoder.tensor.numpy(), expected.reshape(-1))


# Falling back


def no_offer(prefill: Prefill) -> Prefill:
    return replace(prefill, handshake=replace(prefill.handshake, direct=None))


@pytest.mark.parametrize("placement", ["in_place", "staged"])
def test_a_peer_without_an_offer_is_read_over_nixl(
    make: Maker, shared_prefill: Prefill, placement: str
) -> None:
    regions = DecodeCache(SCENARIO).description.regions
    decoder = make(
        no_offer(shared_prefill),
        placement=placement,
        slab_bytes=slab_bytes(regions, num_pages=2),
    )
    peer = decoder.add_peer()
    assert "does not offer" in peer.why_not_direct
    assert "not direct: the peer does not offer" in peer.explain()
    decoder.start(A, peer)
    (outcome,) = decoder.run()
    assert isinstance(outcome, Ready) and outcome.placement == placement
    assert decoder.agent.reads
    decoder.check(A)
    assert decoder.driver.calls == []


def test_a_gpu_out_of_reach_is_a_reason_and_the_pair_is_served(
    make: Maker, shared_prefill: Prefill
) -> None:
    driver = FakeDriver(uuids=(UUIDS[1], UUIDS[0]), unreachable=frozenset({(0, 1)}))
    decoder = make(shared_prefill, driver)
    peer = decoder.add_peer()
    assert UUIDS[0] in peer.why_not_direct
    decoder.start(B, peer)
    (outcome,) = decoder.run()
    assert isinstance(outcome, Ready) and outcome.placement == "in_place"
    decoder.check(B)
    assert unmapped(decoder)


def test_memory_that_does_not_map_is_a_reason(make: Maker, shared_prefill: Prefill) -> None:
    decoder = make(shared_prefill, FakeDriver(fail_open_after=0))
    peer = decoder.add_peer()
    assert "out of memory" in peer.why_not_direct
    decoder.start(A, peer)
    assert isinstance(decoder.run()[0], Ready)
    decoder.check(A)
    assert eventually(lambda: unmapped(decoder))


@pytest.mark.parametrize("equal", [False, True])
def test_pages_that_no_kernel_takes_are_a_reason(
    make: Maker, shared_prefill: Prefill, monkeypatch: pytest.MonkeyPatch, equal: bool
) -> None:
    """The mapping works and the kernel does not: NIXL serves the pair, nothing stays mapped."""

    def refuse(source: Any, target: Any, **more: Any) -> Any:
        if more:
            raise ConversionError("tiles do not nest", code="tiles-do-not-nest", field="source")
        return prepare(source, target)

    monkeypatch.setattr(kvpd.connect, "prepare", refuse)
    decoder = make(shared_prefill, equal=equal)
    with pytest.raises(DirectError) as caught:
        decoder.add_peer(must_be_direct=True)
    assert caught.value.code == "tiles-do-not-nest"
    assert decoder.driver.num_open == 0 and decoder.agent.peers == []
    peer = decoder.add_peer()
    assert "tiles do not nest" in peer.why_not_direct and peer.mapping is None
    decoder.start(A, peer)
    (outcome,) = decoder.run()
    assert isinstance(outcome, Ready) and outcome.placement == "in_place"
    if not equal:
        decoder.check(A)
    decoder.receiver.remove_peer(peer)
    assert eventually(lambda: unmapped(decoder))


def test_a_launch_waits_for_room_in_the_queue(
    make: Maker, shared_prefill: Prefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full queue would make the engine's thread wait for the GPU."""
    decoder = make(shared_prefill)
    peer = decoder.add_peer(must_be_direct=True)
    has_room = False
    monkeypatch.setattr(
        type(decoder.queue), "has_room", property(lambda queue: has_room), raising=True
    )
    decoder.start(A, peer)
    assert decoder.poll() == [] and decoder.queue.converted == []
    has_room = True
    (outcome,) = decoder.run()
    assert isinstance(outcome, Ready)
    decoder.check(A)


def test_a_closed_receiver_takes_no_peer(make: Maker, shared_prefill: Prefill) -> None:
    """A handshake that ends late must not leave anything mapped."""
    decoder = make(shared_prefill)
    decoder.receiver.close()
    with pytest.raises(TransferError) as caught:
        decoder.add_peer()
    assert caught.value.code == "closed" and decoder.driver.num_open == 0


def test_not_asked_for_nothing_is_mapped(make: Maker, shared_prefill: Prefill) -> None:
    decoder = make(shared_prefill, direct=False)
    peer = decoder.add_peer()
    assert peer.why_not_direct == "" and peer.mapping is None
    decoder.start(A, peer)
    (outcome,) = decoder.run()
    assert isinstance(outcome, Ready) and outcome.placement == "in_place"
    assert decoder.driver.calls == []


def test_must_be_direct_leaves_nothing_behind(make: Maker, shared_prefill: Prefill) -> None:
    for prefill, driver, code in (
        (no_offer(shared_prefill), FakeDriver(), "no-offer"),
        (shared_prefill, FakeDriver(fail_open_after=0), "driver"),
    ):
        decoder = make(prefill, driver)
        with pytest.raises(DirectError) as caught:
            decoder.add_peer(must_be_direct=True)
        assert caught.value.code == code
        assert (decoder.agent.peers, decoder.agent.rows) == ([], [])
        assert eventually(lambda: shared_prefill.ask("mapped") == 0)
        # The same peer can be added another way.
        assert decoder.add_peer().mapping is None


def test_a_peer_that_nixl_refuses_is_unmapped(make: Maker, shared_prefill: Prefill) -> None:
    broken = replace(shared_prefill.handshake, nixl_metadata=b"no metadata")
    decoder = make(replace(shared_prefill, handshake=broken))
    with pytest.raises(TransferError):
        decoder.add_peer(must_be_direct=True)
    assert decoder.driver.calls != []
    assert eventually(lambda: unmapped(decoder))


# Memory that a kernel may still read


def test_unmapping_waits_for_the_conversion(make: Maker, shared_prefill: Prefill) -> None:
    decoder = make(shared_prefill)
    peer = decoder.add_peer()
    decoder.queue.holds = True
    decoder.start(A, peer)
    decoder.receiver.remove_peer(peer)
    assert decoder.poll(20) == []
    assert decoder.driver.num_open == 1 and shared_prefill.ask("mapped") == 1
    with pytest.raises(TransferError) as caught:
        decoder.start(B, peer)
    assert caught.value.code == "unknown-peer"
    decoder.queue.holds = False
    (outcome,) = decoder.run()
    assert failure(outcome) == (A, "peer-removed", blocks_of(A))
    assert decoder.agent.sent == []
    assert eventually(lambda: unmapped(decoder))


def test_close_waits_and_says_so(make: Maker, shared_prefill: Prefill) -> None:
    decoder = make(shared_prefill)
    peer = decoder.add_peer()
    decoder.queue.holds = True
    decoder.start(A, peer)
    with pytest.raises(TransferError) as caught:
        decoder.receiver.close(timeout_seconds=0.05)
    assert caught.value.code == "transfers-active"
    assert decoder.driver.num_open == 1
    decoder.queue.holds = False
    assert [failure(o)[1] for o in decoder.receiver.close()] == ["peer-removed"]
    assert eventually(lambda: unmapped(decoder))


def test_an_aborted_request_keeps_its_blocks_until_the_kernel_ended(
    make: Maker, shared_prefill: Prefill
) -> None:
    decoder = make(shared_prefill)
    peer = decoder.add_peer()
    decoder.queue.holds = True
    decoder.start(A, peer)
    decoder.receiver.abort(A)
    assert decoder.poll() == []
    with pytest.raises(PlanError) as caught:
        decoder.receiver.start("again", peer, SCENARIO.decode_ids()[A], SCENARIO.prefill_ids()[A])
    assert caught.value.code == "blocks-in-flight"
    decoder.queue.holds = False
    assert [failure(o) for o in decoder.run()] == [(A, "aborted", blocks_of(A))]
    assert decoder.agent.sent == []


@pytest.mark.parametrize("already", [False, True], ids=["while it runs", "before it is seen done"])
def test_a_deadline_that_passes_during_a_direct_read(
    make: Maker, shared_prefill: Prefill, already: bool
) -> None:
    """The conversion is the read: a page read after the deadline can be another request's."""
    decoder = make(shared_prefill)
    peer = decoder.add_peer()
    decoder.queue.holds = True
    decoder.start(A, peer, deadline=decoder.now + 1)
    assert decoder.poll() == []
    decoder.now += 1
    if not already:
        assert decoder.poll() == [], "the kernel still reads the peer and writes our blocks"
    decoder.queue.holds = False
    assert [failure(o) for o in decoder.run()] == [(A, "deadline-passed", blocks_of(A))]
    assert decoder.agent.sent == []
    # The pair goes on.
    decoder.start(B, peer, deadline=decoder.now + 1)
    assert [type(outcome) for outcome in decoder.run()] == [Ready]


def test_a_conversion_that_cannot_tell_keeps_the_memory_mapped(
    make: Maker, own_prefill: Prefill
) -> None:
    decoder = make(own_prefill)
    peer = decoder.add_peer()
    decoder.queue.breaks = ConversionError("illegal address", code="device-failed")
    decoder.start(A, peer)
    assert [failure(o)[:2] for o in decoder.run()] == [(A, "conversion-failed")]
    decoder.receiver.remove_peer(peer)
    decoder.poll()
    assert decoder.driver.num_open == 1 and own_prefill.ask("mapped") == 1


# A prefill that goes away


def test_a_withdrawn_offer_stops_new_requests_and_unmaps(make: Maker, own_prefill: Prefill) -> None:
    decoder = make(own_prefill)
    peer = decoder.add_peer()
    decoder.queue.holds = True
    decoder.start(A, peer)
    own_prefill.tell("close 60")
    assert eventually(lambda: not peer.is_offered)
    with pytest.raises(TransferError) as caught:
        decoder.start(B, peer)
    assert caught.value.code == "unknown-peer"
    # What runs may end; only then is the memory let go, and the prefill may free it.
    assert decoder.poll(20) == [] and decoder.driver.num_open == 1
    decoder.queue.holds = False
    (outcome,) = decoder.run()
    assert isinstance(outcome, Ready)
    decoder.check(A)
    assert own_prefill.answer() == 0
    assert decoder.driver.num_open == 0
    with pytest.raises(DirectError) as refused:
        decoder.add_peer(must_be_direct=True)
    assert refused.value.code == "unreachable"


def test_every_peer_that_withdrew_is_let_go(
    make: Maker, shared_prefill: Prefill, own_prefill: Prefill
) -> None:
    decoder = make(shared_prefill)
    stays = decoder.add_peer()
    leaves = decoder.receiver.add_peer(replace(own_prefill.handshake, engine_id="another"))
    own_prefill.tell("close 60")
    assert eventually(lambda: not leaves.is_offered)
    decoder.poll(2)  # one look for each peer
    assert not decoder.receiver.is_connected(leaves)
    assert decoder.receiver.is_connected(stays) and decoder.driver.num_open == 1
    assert own_prefill.answer() == 0


def test_a_prefill_killed_while_its_pages_are_read(make: Maker, own_prefill: Prefill) -> None:
    """They are there as long as they are mapped: the request is right, only nobody to be told."""
    decoder = make(own_prefill)
    peer = decoder.add_peer()
    decoder.start(A, peer)
    assert isinstance(decoder.run()[0], Ready)
    decoder.queue.holds = True
    decoder.start(B, peer)
    own_prefill.kill()
    assert eventually(lambda: not peer.is_offered)
    decoder.queue.holds = False
    (outcome,) = decoder.run()
    assert isinstance(outcome, Ready) or (isinstance(outcome, Failed) and outcome.reason)
    if isinstance(outcome, Ready):
        decoder.check(A, B)
    with pytest.raises(TransferError):
        decoder.start(C, peer)
    assert eventually(lambda: decoder.poll(1) == [] and decoder.driver.num_open == 0)
