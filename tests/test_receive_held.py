"""A peer that says whether it still held what was read: when it is asked, and what follows."""

from __future__ import annotations

from typing import Literal

import pytest

pytest.importorskip("torch")
pytest.importorskip("nixl")

from kvpd.request import NotHeld, Ready
from tests.receive_bench import A, B, Bench, Maker, blocks_of, failure

pytest_plugins = ("tests.receive_fixtures",)

GONE = NotHeld("not-held", "given back")


class Owner:
    """Answers as it is told to, and notes what it was asked after."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.answer: Literal["held"] | NotHeld | None = None
        self.asked = 0
        self.notices_when_asked: list[int] = []

    def __call__(self) -> Literal["held"] | NotHeld | None:
        assert not self.bench.agent.holds, "asked before the last byte was read"
        self.asked += 1
        self.notices_when_asked.append(len(self.bench.agent.sent))
        return self.answer


@pytest.fixture
def bench(make: Maker, placement: str) -> Bench:
    return make(placement)


def test_ready_and_the_notice_wait_for_the_answer(bench: Bench) -> None:
    owner = Owner(bench)
    peer = bench.receiver.add_peer(bench.handshake)
    bench.agent.holds = True
    bench.start(A, peer, is_held=owner)
    assert bench.poll() == [] and owner.asked == 0
    bench.agent.holds = False
    bench.until(lambda: owner.asked > 2)
    assert bench.poll() == [] and bench.receiver.is_live(A) and bench.agent.sent == []
    bench.now += 5
    owner.answer = "held"
    (outcome,) = bench.run()
    assert isinstance(outcome, Ready)
    assert outcome.timings.held_seconds == 5 and outcome.timings.convert_seconds == 0
    assert bench.agent.sent == [A.encode()] and set(owner.notices_when_asked) == {0}
    asked = owner.asked
    bench.poll()
    assert owner.asked == asked, "one answer is enough"
    bench.check(A)


def test_the_conversion_goes_on_while_the_peer_is_asked(bench: Bench) -> None:
    owner = Owner(bench)
    owner.answer = "held"
    peer = bench.receiver.add_peer(bench.handshake)
    bench.queue.holds = True
    bench.start(A, peer, is_held=owner)
    bench.until(lambda: owner.asked > 0)
    assert bench.poll() == [] and bench.agent.sent == [], "held, and not yet converted"
    bench.queue.holds = False
    assert [type(outcome) for outcome in bench.run()] == [Ready]
    bench.check(A)


def test_what_is_not_held_fails_and_sends_nothing(bench: Bench) -> None:
    owner = Owner(bench)
    owner.answer = GONE
    peer = bench.receiver.add_peer(bench.handshake)
    bench.start(A, peer, is_held=owner)
    bench.start(B, peer)
    outcomes = {outcome.request_id: outcome for outcome in bench.run()}
    assert failure(outcomes[A]) == (A, "not-held", blocks_of(A))
    assert isinstance(outcomes[B], Ready) and bench.agent.sent == [B.encode()]


def test_what_is_not_held_waits_for_its_conversion(bench: Bench) -> None:
    owner = Owner(bench)
    owner.answer = GONE
    peer = bench.receiver.add_peer(bench.handshake)
    bench.queue.holds = True
    bench.start(A, peer, is_held=owner)
    bench.until(lambda: owner.asked > 0)
    assert bench.poll() == [], "the conversion still writes the blocks"
    bench.queue.holds = False
    assert [failure(o)[1] for o in bench.run()] == ["not-held"]


def test_late_but_held_is_ready(bench: Bench) -> None:
    owner = Owner(bench)
    owner.answer = "held"
    peer = bench.receiver.add_peer(bench.handshake)
    bench.agent.holds = True
    bench.start(A, peer, deadline=bench.now + 1, is_held=owner)
    bench.now += 2
    assert bench.poll() == []
    bench.agent.holds = False
    assert [type(outcome) for outcome in bench.run()] == [Ready]
    bench.check(A)


def test_the_deadline_decides_not_to_begin(bench: Bench) -> None:
    owner = Owner(bench)
    peer = bench.receiver.add_peer(bench.handshake)
    bench.start(A, peer, deadline=bench.now, is_held=owner)
    assert [failure(o)[1] for o in bench.poll()] == ["deadline-passed"]
    assert bench.agent.reads == [] and owner.asked == 0


def test_a_request_that_began_takes_its_further_chunks_late(make: Maker) -> None:
    """Only its first chunk was read in time; the answer is about all of them."""
    bench = make("staged", slab_pages=1)
    owner = Owner(bench)
    owner.answer = "held"
    peer = bench.receiver.add_peer(bench.handshake)
    bench.agent.holds = True
    bench.start(A, peer, deadline=bench.now + 1, is_held=owner)
    num_reads = len(bench.agent.reads)
    bench.now += 2
    bench.agent.holds = False
    assert [type(outcome) for outcome in bench.run()] == [Ready]
    assert len(bench.agent.reads) > num_reads
    bench.check(A)


def test_a_failed_read_asks_nobody(bench: Bench) -> None:
    owner = Owner(bench)
    peer = bench.receiver.add_peer(bench.handshake)
    bench.agent.fails = True
    bench.start(A, peer, is_held=owner)
    assert [failure(o)[1] for o in bench.run()] == ["read-failed"]
    assert owner.asked == 0


def test_aborted_while_the_peer_is_asked(bench: Bench) -> None:
    owner = Owner(bench)
    peer = bench.receiver.add_peer(bench.handshake)
    bench.start(A, peer, is_held=owner)
    bench.until(lambda: owner.asked > 0)
    bench.receiver.abort(A)
    assert [failure(o)[1] for o in bench.poll()] == ["aborted"]
    assert bench.agent.sent == []


def test_an_error_while_asking_ends_one_request(bench: Bench) -> None:
    def broken() -> None:
        raise RuntimeError("injected by the test")

    peer = bench.receiver.add_peer(bench.handshake)
    bench.start(A, peer, is_held=broken)
    bench.start(B, peer)
    outcomes = {outcome.request_id: outcome for outcome in bench.run()}
    assert failure(outcomes[A])[1] == "internal-error" and isinstance(outcomes[B], Ready)
