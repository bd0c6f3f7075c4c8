"""Direct reads that end early: memory stays mapped, and blocks taken, while a kernel may read."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from typing import Literal

import pytest

pytest.importorskip("torch")
pytest.importorskip("nixl")

from kvpd.errors import ConversionError, DirectError, PlanError, TransferError
from kvpd.request import Failed, NotHeld, Ready
from tests.direct.decoder import Maker, unmapped
from tests.direct.prefill import Prefill
from tests.receive_bench import SCENARIO, A, B, C, blocks_of, failure
from tests.waiting import eventually

pytest_plugins = ("tests.direct.receive_fixtures",)


# Memory that a kernel may still read


def test_unmapping_waits_for_the_conversion(make_direct: Maker, shared_prefill: Prefill) -> None:
    decoder = make_direct(shared_prefill)
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


def test_close_waits_and_says_so(make_direct: Maker, shared_prefill: Prefill) -> None:
    decoder = make_direct(shared_prefill)
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
    make_direct: Maker, shared_prefill: Prefill
) -> None:
    decoder = make_direct(shared_prefill)
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
    make_direct: Maker, shared_prefill: Prefill, already: bool
) -> None:
    """The conversion is the read: a page read after the deadline can be another request's."""
    decoder = make_direct(shared_prefill)
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


@pytest.mark.parametrize("answer", ["held", NotHeld("not-held", "given back")])
def test_a_peer_that_is_asked_after_the_kernel_has_ended(
    make_direct: Maker, shared_prefill: Prefill, answer: Literal["held"] | NotHeld
) -> None:
    """The conversion is the read: asked earlier, the answer would say nothing of what it reads."""
    decoder = make_direct(shared_prefill)
    peer = decoder.add_peer()
    asked = 0

    def is_held() -> Literal["held"] | NotHeld:
        nonlocal asked
        asked += 1
        return answer

    decoder.queue.holds = True
    decoder.start(A, peer, deadline=decoder.now + 1, is_held=is_held)
    decoder.now += 2
    assert decoder.poll() == [] and asked == 0
    decoder.queue.holds = False
    (outcome,) = decoder.run()
    assert asked == 1
    if answer == "held":
        assert isinstance(outcome, Ready) and decoder.agent.sent == [A.encode()]
    else:
        assert failure(outcome)[1] == "not-held" and decoder.agent.sent == []


def test_a_conversion_that_cannot_tell_keeps_the_memory_mapped(
    make_direct: Maker, own_prefill: Prefill
) -> None:
    decoder = make_direct(own_prefill)
    peer = decoder.add_peer()
    decoder.queue.breaks = ConversionError("illegal address", code="device-failed")
    decoder.start(A, peer)
    assert [failure(o)[:2] for o in decoder.run()] == [(A, "conversion-failed")]
    decoder.receiver.remove_peer(peer)
    decoder.poll()
    assert decoder.driver.num_open == 1 and own_prefill.ask("mapped") == 1


# A prefill that goes away


def test_a_withdrawn_offer_stops_new_requests_and_unmaps(
    make_direct: Maker, own_prefill: Prefill
) -> None:
    decoder = make_direct(own_prefill)
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
    assert decoder.poll() == []
    with pytest.raises(DirectError) as refused:
        decoder.add_peer(must_be_direct=True)
    assert refused.value.code == "unreachable"


def test_an_idle_decoder_lets_go_as_well(make_direct: Maker, own_prefill: Prefill) -> None:
    """Nobody polls: vLLM does not step an engine without requests."""
    decoder = make_direct(own_prefill)
    peer = decoder.add_peer()
    decoder.start(A, peer)
    assert isinstance(decoder.run()[0], Ready)
    assert own_prefill.ask("close 60") == 0
    assert decoder.driver.num_open == 0
    with pytest.raises(TransferError) as caught:
        decoder.start(B, peer)
    assert caught.value.code == "unknown-peer"
    decoder.poll()
    assert not decoder.receiver.is_connected(peer)


def test_a_forked_child_does_not_keep_up_what_died(
    make_direct: Maker, own_prefill: Prefill
) -> None:
    decoder = make_direct(own_prefill)
    peer = decoder.add_peer()
    child = own_prefill.ask("fork")
    try:
        own_prefill.kill()
        assert eventually(lambda: not peer.is_offered)
        assert eventually(lambda: decoder.driver.num_open == 0)
    finally:
        os.kill(child, signal.SIGKILL)


def test_every_peer_that_withdrew_is_let_go(
    make_direct: Maker, shared_prefill: Prefill, own_prefill: Prefill
) -> None:
    decoder = make_direct(shared_prefill)
    stays = decoder.add_peer()
    leaves = decoder.receiver.add_peer(replace(own_prefill.handshake, engine_id="another"))
    own_prefill.tell("close 60")
    assert eventually(lambda: not leaves.is_offered)
    assert eventually(lambda: decoder.poll(1) or not decoder.receiver.is_connected(leaves))
    assert decoder.receiver.is_connected(stays) and decoder.driver.num_open == 1
    assert own_prefill.answer() == 0


def test_a_prefill_killed_while_its_pages_are_read(
    make_direct: Maker, own_prefill: Prefill
) -> None:
    """They are there as long as they are mapped: the request is right, only nobody to be told."""
    decoder = make_direct(own_prefill)
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
