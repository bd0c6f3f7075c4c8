"""Requests that pass through a slab in chunks."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("nixl")

from kvpd.request import Ready
from tests.receive_bench import SCENARIO, A, B, Maker, blocks_of, failure

PAGE_BYTES = 2 * SCENARIO.heads * SCENARIO.tokens * SCENARIO.head_dim * 2

pytest_plugins = ("tests.receive_fixtures",)


def test_a_request_larger_than_the_slab_comes_in_chunks(make: Maker) -> None:
    """A slab of one page of one layer: a chunk each, one after another, one notice in the end."""
    bench = make("staged", slab_pages=1, slab_bytes=PAGE_BYTES)
    peer = bench.receiver.add_peer(bench.handshake)
    bench.agent.holds = True
    bench.start(A, peer)
    bench.poll()
    assert len(bench.agent.reads) == 1, "there is one slot"
    bench.agent.holds = False
    (outcome,) = bench.run()
    assert isinstance(outcome, Ready)
    assert len(bench.agent.reads) == SCENARIO.layers * len(blocks_of(A))
    assert outcome.descriptors.counted == outcome.descriptors.merged == len(bench.agent.reads)
    assert bench.agent.sent == [A.encode()]
    bench.check(A)


def test_chunks_of_requests_take_turns(make: Maker) -> None:
    """One slot for a quarter of a request: the second need not wait for the whole of the first."""
    bench = make("staged", slab_bytes=PAGE_BYTES)
    peer = bench.receiver.add_peer(bench.handshake)
    bench.agent.holds = True
    for request_id in (A, B):
        bench.start(request_id, peer)
    bench.agent.holds = False
    bench.run()
    owners = "".join("A" if set(ids) <= set(blocks_of(A)) else "B" for ids in bench.queue.converted)
    assert owners == "AABABABB"
    bench.check(A, B)


def test_a_chunk_is_read_while_another_is_converted(make: Maker) -> None:
    """Two slots for a quarter of a request each: the third chunk waits for one of them only."""
    bench = make("staged", slab_bytes=2 * PAGE_BYTES, num_slots=2)
    peer = bench.receiver.add_peer(bench.handshake)
    bench.agent.holds = bench.queue.holds = True
    bench.start(A, peer)
    assert len(bench.agent.reads) == 2
    bench.agent.holds = False
    bench.until(lambda: len(bench.queue.converted) == 2)
    bench.poll()
    assert len(bench.agent.reads) == 2, "the conversions still read the slots"
    bench.queue.holds = False
    (outcome,) = bench.run()
    assert isinstance(outcome, Ready)
    bench.check(A)


@pytest.mark.parametrize("how", ["abort", "fail"])
def test_a_request_that_ends_between_its_chunks(make: Maker, how: str) -> None:
    """No raw page is in the cache, no further chunk begins, no slot stays taken, no notice."""
    bench = make("staged", slab_pages=1)
    peer = bench.receiver.add_peer(bench.handshake)
    bench.queue.holds = True  # before the start: a tiny READ can be done, and converted, within it
    bench.start(A, peer)
    bench.until(lambda: len(bench.queue.converted) == 1)
    if how == "abort":
        bench.receiver.abort(A)
        bench.queue.holds = False
    else:
        bench.agent.fails = True
        bench.queue.holds = False
        bench.until(lambda: not bench.receiver.num_live)
    bench.run()
    code = "aborted" if how == "abort" else "read-failed"
    assert [failure(o) for o in bench.ended] == [(A, code, blocks_of(A))]
    assert len(bench.queue.converted) == 1 and bench.agent.sent == []
    assert bench.receiver.slab_use == 0
    bench.agent.fails = False
    bench.start(B, peer)
    assert isinstance(bench.run()[0], Ready)
    for block in bench.queue.converted[0]:
        bench.poison(block)
    bench.check(B)
