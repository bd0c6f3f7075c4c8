"""Pages read from a peer's memory directly, and pairs that are served otherwise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("nixl")

import kvpd.connect
from kvpd import slab_bytes
from kvpd.cli.demo.decode import DecodeCache
from kvpd.cli.demo.prefill import written_memory
from kvpd.cli.demo.scenario import DECODE_POISON
from kvpd.convert import prepare
from kvpd.errors import ConversionError, DirectError, TransferError
from kvpd.request import Ready
from tests.direct.decoder import Maker, unmapped
from tests.direct.fake_driver import UUIDS, FakeDriver
from tests.direct.prefill import Prefill
from tests.receive_bench import SCENARIO, A, B, C
from tests.waiting import eventually

pytest_plugins = ("tests.direct.receive_fixtures",)


# What is served


def test_pages_come_converted_without_a_read(make_direct: Maker, shared_prefill: Prefill) -> None:
    decoder = make_direct(shared_prefill)
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


def test_equal_formats_come_the_same_way(make_direct: Maker, shared_prefill: Prefill) -> None:
    decoder = make_direct(shared_prefill, equal=True)
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
    make_direct: Maker, shared_prefill: Prefill, placement: str
) -> None:
    regions = DecodeCache(SCENARIO).description.regions
    decoder = make_direct(
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
    make_direct: Maker, shared_prefill: Prefill
) -> None:
    driver = FakeDriver(uuids=(UUIDS[1], UUIDS[0]), unreachable=frozenset({(0, 1)}))
    decoder = make_direct(shared_prefill, driver)
    peer = decoder.add_peer()
    assert UUIDS[0] in peer.why_not_direct
    decoder.start(B, peer)
    (outcome,) = decoder.run()
    assert isinstance(outcome, Ready) and outcome.placement == "in_place"
    decoder.check(B)
    assert unmapped(decoder)


def test_memory_that_does_not_map_is_a_reason(make_direct: Maker, shared_prefill: Prefill) -> None:
    decoder = make_direct(shared_prefill, FakeDriver(fail_open_after=0))
    peer = decoder.add_peer()
    assert "out of memory" in peer.why_not_direct
    decoder.start(A, peer)
    assert isinstance(decoder.run()[0], Ready)
    decoder.check(A)
    assert eventually(lambda: unmapped(decoder))


@pytest.mark.parametrize("equal", [False, True])
def test_pages_that_no_kernel_takes_are_a_reason(
    make_direct: Maker, shared_prefill: Prefill, monkeypatch: pytest.MonkeyPatch, equal: bool
) -> None:
    """The mapping works and the kernel does not: NIXL serves the pair, nothing stays mapped."""

    def refuse(source: Any, target: Any, **more: Any) -> Any:
        if more:
            raise ConversionError("tiles do not nest", code="tiles-do-not-nest", field="source")
        return prepare(source, target)

    monkeypatch.setattr(kvpd.connect, "prepare", refuse)
    decoder = make_direct(shared_prefill, equal=equal)
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
    make_direct: Maker, shared_prefill: Prefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full queue would make the engine's thread wait for the GPU."""
    decoder = make_direct(shared_prefill)
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


def test_a_closed_receiver_takes_no_peer(make_direct: Maker, shared_prefill: Prefill) -> None:
    """A handshake that ends late must not leave anything mapped."""
    decoder = make_direct(shared_prefill)
    decoder.receiver.close()
    with pytest.raises(TransferError) as caught:
        decoder.add_peer()
    assert caught.value.code == "closed" and decoder.driver.num_open == 0


def test_not_asked_for_nothing_is_mapped(make_direct: Maker, shared_prefill: Prefill) -> None:
    decoder = make_direct(shared_prefill, direct=False)
    peer = decoder.add_peer()
    assert peer.why_not_direct == "" and peer.mapping is None
    decoder.start(A, peer)
    (outcome,) = decoder.run()
    assert isinstance(outcome, Ready) and outcome.placement == "in_place"
    assert decoder.driver.calls == []


def test_must_be_direct_leaves_nothing_behind(make_direct: Maker, shared_prefill: Prefill) -> None:
    for prefill, driver, code in (
        (no_offer(shared_prefill), FakeDriver(), "no-offer"),
        (shared_prefill, FakeDriver(fail_open_after=0), "driver"),
    ):
        decoder = make_direct(prefill, driver)
        with pytest.raises(DirectError) as caught:
            decoder.add_peer(must_be_direct=True)
        assert caught.value.code == code
        assert (decoder.agent.peers, decoder.agent.rows) == ([], [])
        assert eventually(lambda: shared_prefill.ask("mapped") == 0)
        # The same peer can be added another way.
        assert decoder.add_peer().mapping is None


def test_a_peer_that_nixl_refuses_is_unmapped(make_direct: Maker, shared_prefill: Prefill) -> None:
    broken = replace(shared_prefill.handshake, nixl_metadata=b"no metadata")
    decoder = make_direct(replace(shared_prefill, handshake=broken))
    with pytest.raises(TransferError):
        decoder.add_peer(must_be_direct=True)
    assert decoder.driver.calls != []
    assert eventually(lambda: unmapped(decoder))
