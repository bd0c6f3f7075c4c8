"""Peers: judged before anything of them is registered, added once, let go of in time."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("torch")
pytest.importorskip("nixl")

from kvpd import wire
from kvpd.errors import RefusedError, TransferError
from kvpd.receive import Receiver
from kvpd.request import Ready
from tests.receive_bench import A, Maker, blocks_of, failure

pytest_plugins = ("tests.receive_fixtures",)


def test_a_refused_peer_is_never_registered(make: Maker, placement: str) -> None:
    bench = make(placement, convert=False)
    with pytest.raises(RefusedError) as caught:
        bench.receiver.add_peer(bench.handshake)
    assert [reason.code for reason in caught.value.verdict.reasons] == ["conversion-disabled"]
    with pytest.raises(RefusedError):
        bench.receiver.add_peer(None)
    assert bench.agent.peers == [] and bench.agent.rows == []
    assert not bench.agent.knows_peer(bench.prefill.name)


@pytest.mark.parametrize("require_tagged", [False, True])
def test_an_untagged_peer_is_never_read_by_guess(
    make: Maker, require_tagged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Standard local pages: the verdict may accept it, but it published nothing to read from."""
    bench = make("in_place")
    there = bench.handshake.description
    receiver = Receiver(bench.agent, there, [], require_tagged=require_tagged)
    with pytest.raises(RefusedError if require_tagged else TransferError) as caught:
        receiver.add_peer(None)
    assert caught.value.code == ("refused" if require_tagged else "untagged-peer")
    assert ("untagged-peer" in caplog.text) == (not require_tagged)
    assert bench.agent.peers == []


def test_an_accepted_peer_whose_rows_fail_leaves_nothing(make: Maker, placement: str) -> None:
    bench = make(placement)
    bench.agent.refuses_rows = True
    with pytest.raises(TransferError):
        bench.receiver.add_peer(bench.handshake)
    assert bench.agent.peers == [] and bench.agent.rows == []
    bench.agent.refuses_rows = False
    bench.start(A, bench.receiver.add_peer(bench.handshake))
    assert isinstance(bench.run()[0], Ready)
    bench.check(A)


def test_a_peer_is_added_once_and_can_come_back(make: Maker, placement: str) -> None:
    bench = make(placement)
    peer = bench.receiver.add_peer(bench.handshake)
    with pytest.raises(TransferError) as caught:
        bench.receiver.add_peer(bench.handshake)
    assert caught.value.code == "duplicate-peer"
    bench.receiver.remove_peer(peer)
    assert bench.agent.peers == [] and bench.agent.rows == []
    with pytest.raises(TransferError) as caught:
        bench.start(A, peer)
    assert caught.value.code == "unknown-peer"
    bench.start(A, bench.receiver.add_peer(bench.handshake))
    assert isinstance(bench.run()[0], Ready)
    bench.check(A)


def test_an_agent_belongs_to_one_peer(make: Maker, placement: str) -> None:
    """A second peer of one agent's name, when it goes, would take the first one with it."""
    bench = make(placement)
    peer = bench.receiver.add_peer(bench.handshake)
    with pytest.raises(TransferError) as caught:
        bench.receiver.add_peer(replace(bench.handshake, engine_id="somebody else"))
    assert caught.value.code == "duplicate-agent"
    bench.start(A, peer)
    assert isinstance(bench.run()[0], Ready)
    bench.check(A)


def test_a_removed_peer_goes_when_nothing_of_it_is_written_any_more(
    make: Maker, placement: str
) -> None:
    bench = make(placement)
    peer = bench.receiver.add_peer(bench.handshake)
    bench.agent.holds = True
    bench.start(A, peer)
    bench.receiver.remove_peer(peer)
    assert bench.poll() == [] and len(bench.agent.peers) == 1
    bench.agent.holds = False
    assert [failure(o) for o in bench.run()] == [(A, "peer-removed", blocks_of(A))]
    assert bench.agent.peers == [] and bench.agent.rows == []
    assert bench.queue.converted == []


def test_layers_published_in_another_order_land_in_their_own_place(
    make: Maker, placement: str
) -> None:
    bench = make(placement)
    there = bench.handshake.description
    turned = type(there)(there.facts, tuple(reversed(there.regions)))
    peer = bench.receiver.add_peer(wire.Handshake("turned", turned, bench.handshake.nixl_metadata))
    bench.start(A, peer)
    assert isinstance(bench.run()[0], Ready)
    bench.check(A)
