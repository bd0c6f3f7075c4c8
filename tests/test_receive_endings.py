"""Requests that fail, are aborted or are late: never converted, all their blocks reported."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("nixl")

from kvpd.errors import TransferError
from kvpd.request import Ready
from tests.receive_bench import SCENARIO, A, B, Maker, blocks_of, failure

pytest_plugins = ("tests.receive_fixtures",)


def test_a_failed_read(make: Maker, placement: str) -> None:
    bench = make(placement)
    peer = bench.receiver.add_peer(bench.handshake)
    bench.agent.fails = True
    bench.start(A, peer)
    (outcome,) = bench.run()
    assert failure(outcome) == (A, "read-failed", blocks_of(A))
    assert "ERR" in outcome.reason  # type: ignore[union-attr]
    assert bench.queue.converted == [] and bench.agent.sent == []
    if placement == "staged":
        bench.check()
    # The blocks are free for the next request, whose pages are right.
    bench.agent.fails = False
    bench.start(A, peer)
    assert isinstance(bench.run()[0], Ready)
    bench.check(A)


@pytest.mark.parametrize("when", ["queued", "reading", "converting"])
def test_an_aborted_request(make: Maker, placement: str, when: str) -> None:
    bench = make(placement)
    peer = bench.receiver.add_peer(bench.handshake)
    if when == "queued":
        if placement == "in_place":
            pytest.skip("nothing queues for a place in the cache")
        bench.agent.holds = True
        bench.start(B, peer)
    bench.agent.holds = when != "converting"
    bench.queue.holds = True
    bench.start(A, peer)
    if when == "converting":
        bench.until(lambda: bool(bench.queue.converted))
    bench.receiver.abort(A)
    outcomes = bench.poll()
    if when != "queued":
        assert outcomes == [], "the READ, or the kernel, still writes the blocks"
        bench.agent.holds = bench.queue.holds = False
        outcomes = bench.run()
    assert [failure(outcome) for outcome in outcomes] == [(A, "aborted", blocks_of(A))]
    assert bench.queue.converted == ([] if when != "converting" else [sorted_as_read(A)])
    assert bench.agent.sent == []
    with pytest.raises(TransferError) as caught:
        bench.receiver.abort(A)
    assert caught.value.code == "unknown-request"


def sorted_as_read(request_id: str) -> list[int]:
    """Local ids in ascending order of the remote ids they are paired with."""
    pairs = zip(SCENARIO.prefill_ids()[request_id], SCENARIO.decode_ids()[request_id], strict=True)
    return [local for _, local in sorted(pairs)]


def test_a_deadline_that_passed_before_the_start(make: Maker, placement: str) -> None:
    bench = make(placement)
    peer = bench.receiver.add_peer(bench.handshake)
    bench.start(A, peer, deadline=bench.now)
    (outcome,) = bench.poll()
    assert failure(outcome) == (A, "deadline-passed", blocks_of(A))
    assert bench.agent.reads == [] and bench.queue.converted == [] and bench.agent.sent == []
    bench.check()


def test_a_deadline_that_passes_in_the_queue(make: Maker) -> None:
    bench = make("staged")
    peer = bench.receiver.add_peer(bench.handshake)
    bench.agent.holds = True
    bench.start(A, peer)
    bench.start(B, peer, deadline=bench.now + 1)
    bench.now += 1
    assert [failure(o) for o in bench.poll()] == [(B, "deadline-passed", blocks_of(B))]
    assert len(bench.agent.reads) == 1
    bench.agent.holds = False
    assert isinstance(bench.run()[0], Ready)
    bench.check(A)


@pytest.mark.parametrize("done_too_late", [False, True])
def test_a_deadline_that_passes_during_the_read(
    make: Maker, placement: str, done_too_late: bool
) -> None:
    """Also a READ that is found done after the deadline: its pages may be another request's."""
    bench = make(placement)
    peer = bench.receiver.add_peer(bench.handshake)
    bench.agent.holds = True
    bench.start(A, peer, deadline=bench.now + 1)
    assert bench.poll() == []
    bench.now += 1
    if not done_too_late:
        assert bench.poll() == [], "the READ still writes the blocks"
    bench.agent.holds = False
    assert [failure(o) for o in bench.run()] == [(A, "deadline-passed", blocks_of(A))]
    assert bench.queue.converted == [] and bench.agent.sent == []


def test_a_deadline_that_passes_during_the_conversion_changes_nothing(
    make: Maker, placement: str
) -> None:
    bench = make(placement)
    peer = bench.receiver.add_peer(bench.handshake)
    bench.queue.holds = True
    bench.start(A, peer, deadline=bench.now + 1)
    bench.until(lambda: bool(bench.queue.converted))
    bench.now += 1
    assert bench.poll() == []
    bench.queue.holds = False
    (outcome,) = bench.poll()
    assert isinstance(outcome, Ready)
    bench.check(A)


def test_a_lease_that_is_renewed_while_a_request_is_read(make: Maker, placement: str) -> None:
    bench = make(placement)
    peer = bench.receiver.add_peer(bench.handshake)
    bench.agent.holds = True
    bench.start(A, peer, deadline=bench.now + 1)
    bench.receiver.extend(A, bench.now + 10)
    bench.receiver.extend(A, bench.now + 2)  # never earlier
    bench.receiver.extend("unknown", bench.now)
    bench.now += 5
    assert bench.poll() == []
    bench.agent.holds = False
    (outcome,) = bench.run()
    assert isinstance(outcome, Ready)
    bench.check(A)
