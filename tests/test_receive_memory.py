"""Memory that something may still read or write is not reused, reported or let go."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("nixl")

from kvpd.errors import ConversionError, PlanError, TransferError
from kvpd.request import Failed, Ready
from tests.receive_bench import SCENARIO, A, B, C, Maker, blocks_of, failure

pytest_plugins = ("tests.receive_fixtures",)


def test_failed_is_reported_only_when_the_handle_was_released(make: Maker, placement: str) -> None:
    bench = make(placement)
    peer = bench.receiver.add_peer(bench.handshake)
    bench.agent.fails = bench.agent.refuses_release = True
    bench.start(A, peer)
    assert bench.poll() == []
    bench.agent.fails = False
    with pytest.raises(PlanError) as caught:
        bench.receiver.start("again", peer, SCENARIO.decode_ids()[A], SCENARIO.prefill_ids()[A])
    assert caught.value.code == "blocks-in-flight"
    bench.agent.refuses_release = False
    assert [failure(o) for o in bench.poll()] == [(A, "read-failed", blocks_of(A))]


def test_the_slab_waits_for_the_handle_of_a_failed_read(make: Maker) -> None:
    bench = make("staged")
    peer = bench.receiver.add_peer(bench.handshake)
    bench.agent.fails = bench.agent.refuses_release = True
    bench.start(A, peer)
    bench.poll(1)
    bench.agent.fails = False
    bench.start(B, peer)
    bench.poll()
    assert len(bench.agent.reads) == 1, "the slab was given away while a READ may write it"
    bench.agent.refuses_release = False
    assert {o.request_id: type(o) for o in bench.run()} == {A: Failed, B: Ready}
    bench.check(B)


def test_the_slab_waits_for_the_handle_of_a_completed_read(make: Maker) -> None:
    bench = make("staged")
    peer = bench.receiver.add_peer(bench.handshake)
    bench.agent.refuses_release = True
    bench.start(A, peer)
    bench.start(B, peer)
    bench.until(lambda: bool(bench.queue.converted))
    assert bench.poll() == [] and len(bench.agent.reads) == 1
    bench.agent.refuses_release = False
    assert [type(outcome) for outcome in bench.run()] == [Ready, Ready]
    bench.check(A, B)


def test_the_slab_waits_for_the_conversion(make: Maker) -> None:
    bench = make("staged")
    peer = bench.receiver.add_peer(bench.handshake)
    bench.queue.holds = True
    for request_id in (A, B, C):
        bench.start(request_id, peer)
    bench.until(lambda: bool(bench.queue.converted))
    assert bench.poll() == [] and len(bench.agent.reads) == 1
    bench.queue.holds = False
    assert [outcome.request_id for outcome in bench.run()] == [A, B, C], "first come, first served"
    bench.check(A, B, C)


def test_a_late_comer_does_not_overtake_those_who_wait_for_the_slab(make: Maker) -> None:
    bench = make("staged")
    peer = bench.receiver.add_peer(bench.handshake)
    bench.agent.holds = True
    bench.start(A, peer)
    bench.start(B, peer)
    bench.receiver.abort(A)  # gives the slab back between two polls
    bench.start(C, peer)
    bench.agent.holds = False
    assert [outcome.request_id for outcome in bench.run()] == [A, B, C]
    bench.check(B, C)


def test_a_conversion_that_is_refused(make: Maker, placement: str) -> None:
    bench = make(placement)
    peer = bench.receiver.add_peer(bench.handshake)
    bench.queue.refuses = ConversionError("no kernel", code="no-kernel")
    bench.start(A, peer)
    assert [failure(o) for o in bench.run()] == [(A, "conversion-failed", blocks_of(A))]
    assert bench.agent.sent == []
    bench.queue.refuses = None
    bench.start(A, peer)
    assert isinstance(bench.run()[0], Ready)
    bench.check(A)


def test_a_conversion_that_blows_up_is_not_submitted_again(make: Maker, placement: str) -> None:
    bench = make(placement)
    peer = bench.receiver.add_peer(bench.handshake)
    bench.queue.refuses = ZeroDivisionError("a bug")
    bench.agent.holds = True
    bench.start(A, peer)
    bench.agent.holds = False
    # It ends its request, and not the caller.
    assert [failure(o) for o in bench.run()] == [(A, "conversion-failed", blocks_of(A))]
    bench.queue.refuses = None
    assert bench.run() == []
    assert bench.queue.converted == []


def test_a_device_error_gives_the_slab_up_for_good(make: Maker) -> None:
    bench = make("staged")
    peer = bench.receiver.add_peer(bench.handshake)
    bench.queue.breaks = ConversionError("illegal address", code="device")
    bench.agent.holds = True  # nothing is converted, and the peer stays, until both have started
    bench.start(A, peer)
    bench.start(B, peer)
    bench.agent.holds = False
    outcomes = bench.run()
    assert [failure(o)[:2] for o in outcomes] == [
        (A, "conversion-failed"),
        (B, "conversion-failed"),
    ]
    assert len(bench.agent.reads) == 1, "what still reads the slab is unknown"


def test_close_does_not_let_go_of_memory_that_is_written(make: Maker, placement: str) -> None:
    bench = make(placement)
    peer = bench.receiver.add_peer(bench.handshake)
    bench.agent.holds = bench.agent.refuses_release = True
    bench.start(A, peer)
    with pytest.raises(TransferError) as caught:
        bench.receiver.close(timeout_seconds=0.05)
    assert (caught.value.code, caught.value.got) == ("transfers-active", A)
    assert len(bench.agent.peers) == 1
    assert len(bench.agent.registrations) == (2 if placement == "staged" else 1)
    bench.agent.holds = bench.agent.refuses_release = False
    outcomes = bench.receiver.close()
    assert [failure(o) for o in outcomes] == [(A, "peer-removed", blocks_of(A))]
