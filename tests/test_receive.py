"""The receive pipeline against its rules. READs are real NIXL between two agents of this process.

What the caches must hold comes from the demo's oracle, which knows none of kvpd's strides.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("nixl")

import torch

from kvpd import PageFormat, Region, wire
from kvpd.cli.demo.decode import DecodeCache
from kvpd.cli.demo.oracle import compare
from kvpd.cli.demo.prefill import handshakes, written_memory
from kvpd.cli.demo.scenario import Scenario
from kvpd.errors import ConversionError, PlanError, RefusedError, TransferError
from kvpd.nixl import MemoryRange
from kvpd.receive import Receiver
from kvpd.request import Failed, Outcome, Ready
from tests.receive_bench import SCENARIO, A, B, Bench, C, Maker, blocks_of, failure

pytest_plugins = ("tests.receive_fixtures",)

# What is served


def test_requests_in_flight_together_are_right_to_the_byte(make: Maker, placement: str) -> None:
    bench = make(placement)
    peer = bench.receiver.add_peer(bench.handshake)
    for request_id in (A, B, C):
        bench.start(request_id, peer)
    outcomes = bench.run()
    assert {outcome.request_id for outcome in outcomes} == {A, B, C}
    for outcome in outcomes:
        assert isinstance(outcome, Ready)
        pages = len(SCENARIO.decode_ids()[outcome.request_id])
        page_bytes = 2 * SCENARIO.heads * SCENARIO.tokens * SCENARIO.head_dim * 2
        assert outcome.num_blocks == pages
        assert outcome.num_bytes == pages * page_bytes * SCENARIO.layers
        planes = 2 if placement == "in_place" else 1
        assert outcome.descriptors.planned == planes * SCENARIO.layers * pages
        assert outcome.descriptors.counted == outcome.descriptors.merged
    bench.check(A, B, C)
    # Exactly the blocks read, each once.
    assert sorted(itertools.chain(*bench.queue.converted)) == list(blocks_of(A, B, C))


def test_one_notice_per_request_and_only_when_all_is_done(make: Maker, placement: str) -> None:
    bench = make(placement)
    peer = bench.receiver.add_peer(bench.handshake)
    bench.agent.holds = True
    bench.start(A, peer, notice=b"free it")
    bench.poll()
    assert bench.agent.sent == []
    bench.agent.holds, bench.queue.holds = False, True
    bench.until(lambda: bool(bench.queue.converted))
    bench.poll()
    assert bench.agent.sent == [], "the slab's, or the mapped, bytes may still be read"
    bench.queue.holds = False
    bench.run()
    bench.start(B, peer)
    bench.run()
    assert bench.agent.sent == [b"free it", B.encode()]
    came: list[bytes] = []

    def all_came() -> bool:
        came.extend(bench.notices())
        return len(came) >= 2

    bench.until(all_came)
    assert came == bench.agent.sent


def test_a_notice_that_cannot_be_sent_does_not_cost_the_pages(make: Maker) -> None:
    bench = make("staged")
    peer = bench.receiver.add_peer(bench.handshake)
    bench.agent.refuses_notices = True
    bench.start(A, peer)
    (outcome,) = bench.run()
    assert isinstance(outcome, Ready) and "no route" in outcome.notice_error
    bench.check(A)


def test_all_groups_converted(make: Maker, placement: str) -> None:
    """Blocks that come in groups ([1, 2], [9]): each is converted once, nothing else changes."""
    scenario = Scenario(layers=2, heads=2, tokens=16, head_dim=16, blocks=6, requests=2)
    bench = make(placement, scenario, slab_pages=3)
    request_id = scenario.request_ids()[0]
    groups = ([1, 2], [9])
    ids = [block for group in groups for block in group]
    peer = bench.receiver.add_peer(bench.handshake)
    bench.receiver.start(request_id, peer, ids, scenario.prefill_ids()[request_id])
    (outcome,) = bench.run()
    assert isinstance(outcome, Ready)
    assert [sorted(converted) for converted in bench.queue.converted] == [[1, 2, 9]]
    comparison = compare(bench.cache.tensor.numpy(), scenario, {request_id: ids})
    assert comparison.holds, comparison.first_wrong


def test_blocks_can_be_read_again(make: Maker, placement: str) -> None:
    bench = make(placement)
    peer = bench.receiver.add_peer(bench.handshake)
    for _ in range(2):
        bench.start(A, peer)
        (outcome,) = bench.run()
        assert isinstance(outcome, Ready)
        bench.check(A)


def test_a_request_without_blocks_is_ready_and_released(make: Maker, placement: str) -> None:
    bench = make(placement)
    peer = bench.receiver.add_peer(bench.handshake)
    bench.receiver.start("all cached", peer, [], [], notice=b"nothing to read")
    (outcome,) = bench.run()
    assert isinstance(outcome, Ready) and outcome.num_bytes == 0
    assert bench.agent.reads == [] and bench.queue.converted == []
    assert bench.agent.sent == [b"nothing to read"]
    bench.check()


@pytest.mark.parametrize("convert", [False, True])
def test_equal_formats_are_read_as_they_are(make: Maker, placement: str, convert: bool) -> None:
    """A decoder with the prefill's own format: bytes move, nothing is converted, no slab."""
    bench = make("in_place")
    scenario, twin = bench.scenario, written_memory(SCENARIO)
    local, remote = scenario.decode_ids(), scenario.prefill_ids()
    twin[:] = 0x5C
    agent = bench.agent
    agent.register([MemoryRange(int(twin.ctypes.data), twin.size)])
    blob = handshakes(scenario, int(twin.ctypes.data), agent.metadata())["standard"]
    mine = wire.decode(blob)
    assert mine is not None
    receiver = Receiver(
        agent,
        mine.description,
        [torch.from_numpy(twin)],
        convert=convert,
        placement=placement,  # type: ignore[arg-type]
        slab_pages=1,  # fewer than are read: equal pages do not pass through a slab
    )
    peer = receiver.add_peer(bench.handshake)
    assert peer.verdict.kind == "identical"
    receiver.start(A, peer, local[A], remote[A])
    outcomes: list[Outcome] = []

    def ended() -> bool:
        outcomes.extend(receiver.poll())
        return bool(outcomes)

    bench.until(ended)
    assert isinstance(outcomes[0], Ready)
    shape = (scenario.layers, scenario.prefill_blocks, -1)
    expected = twin.reshape(shape).copy()
    expected[:] = 0x5C
    expected[:, local[A]] = bench.memory.reshape(shape)[:, remote[A]]
    assert (twin.reshape(shape) == expected).all()
    receiver.close()
    agent.deregister(agent.registrations[-1])


# expired-or-failed: never converted, blocks reported, nobody sees half-converted pages


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
    if when == "converting":
        assert outcomes == [], "the kernel still writes the blocks"
        bench.queue.holds = False
        outcomes = bench.poll()
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
    bench.agent.holds = not done_too_late
    assert [failure(o) for o in bench.poll()] == [(A, "deadline-passed", blocks_of(A))]
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


# Memory that something may still write


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
    with pytest.raises(ZeroDivisionError):
        bench.run()
    bench.queue.refuses = None
    assert [failure(o) for o in bench.run()] == [(A, "conversion-failed", blocks_of(A))]
    assert bench.queue.converted == []


def test_a_device_error_gives_the_slab_up_for_good(make: Maker) -> None:
    bench = make("staged")
    peer = bench.receiver.add_peer(bench.handshake)
    bench.queue.breaks = ConversionError("illegal address", code="device")
    bench.start(A, peer)
    bench.start(B, peer)
    outcomes = bench.run()
    assert [failure(o)[:2] for o in outcomes] == [
        (A, "conversion-failed"),
        (B, "conversion-failed"),
    ]
    assert len(bench.agent.reads) == 1, "what still reads the slab is unknown"


# What is refused at the start leaves nothing behind


def refused_starts(bench: Bench) -> dict[str, tuple[Any, ...]]:
    local, remote = bench.scenario.decode_ids(), bench.scenario.prefill_ids()
    decode_blocks, prefill_blocks = bench.scenario.decode_blocks, bench.scenario.prefill_blocks
    free = [block for block in range(decode_blocks) if block not in local[A]]
    return {
        "duplicate-request": (A, free[:1], remote[B][:1]),
        "blocks-in-flight": (B, [free[0], local[A][0]], remote[B]),
        "block-out-of-range local": (B, [decode_blocks], remote[B][:1]),
        "block-out-of-range remote": (B, free[:1], [prefill_blocks]),
        "unequal lengths": (B, free[:2], remote[B][:1]),
        "twice local": (B, [free[0], free[0]], remote[B]),
        "twice remote": (B, free[:2], [remote[B][0], remote[B][0]]),
        "negative": (B, [-1], remote[B][:1]),
    }


def test_what_cannot_be_started(make: Maker, placement: str) -> None:
    bench = make(placement, slab_pages=4)
    peer = bench.receiver.add_peer(bench.handshake)
    bench.agent.holds = True
    bench.start(A, peer)
    for name, (request_id, local_ids, remote_ids) in refused_starts(bench).items():
        kind = TransferError if name == "duplicate-request" else PlanError
        with pytest.raises(kind) as caught:
            bench.receiver.start(request_id, peer, local_ids, remote_ids)
        assert caught.value.code and caught.value.field, name
        if name.startswith(("duplicate", "block")):
            assert caught.value.code == name.split()[0]
        assert bench.receiver.num_live == 1
    bench.start(B, peer)  # none of the refused starts kept a name, a block or a place
    bench.agent.holds = False
    assert [type(outcome) for outcome in bench.run()] == [Ready, Ready]
    bench.check(A, B)


def test_an_outcome_not_yet_collected_keeps_its_name(make: Maker) -> None:
    bench = make("in_place")
    peer = bench.receiver.add_peer(bench.handshake)
    bench.start(A, peer, deadline=bench.now)
    with pytest.raises(TransferError) as caught:
        bench.start(A, peer)
    assert caught.value.code == "duplicate-request"
    assert len(bench.poll()) == 1


def test_a_request_larger_than_the_slab(make: Maker) -> None:
    bench = make("staged", slab_pages=1)
    peer = bench.receiver.add_peer(bench.handshake)
    with pytest.raises(PlanError) as caught:
        bench.start(A, peer)
    assert (caught.value.code, caught.value.got) == ("larger-than-slab", "2")
    local, remote = SCENARIO.decode_ids()[A], SCENARIO.prefill_ids()[A]
    for index, (ours, theirs) in enumerate(zip(local, remote, strict=True)):
        bench.receiver.start(f"{A}/{index}", peer, [ours], [theirs])
    assert [type(outcome) for outcome in bench.run()] == [Ready, Ready]
    bench.check(A)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"placement": "nowhere"}, "placement"),
        ({"placement": "staged"}, "slab-pages"),
        ({"storages": []}, "no-storages"),
    ],
)
def test_options_that_make_no_sense(make: Maker, changes: dict[str, Any], code: str) -> None:
    bench = make("in_place")
    options = {"storages": [bench.cache.tensor], "convert": True, **changes}
    with pytest.raises(PlanError) as caught:
        Receiver(bench.agent, bench.cache.description, **options)
    assert caught.value.code == code


# Peers


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
    bench.agent.holds = bench.agent.refuses_release = True
    bench.start(A, peer)
    bench.receiver.remove_peer(peer)
    assert bench.poll() == [] and len(bench.agent.peers) == 1
    bench.agent.holds = bench.agent.refuses_release = False
    assert [failure(o) for o in bench.poll()] == [(A, "peer-removed", blocks_of(A))]
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


def test_the_oracle_format_is_the_shuffled_one() -> None:
    """The tests above compare pages that differ from the raw ones in every block."""
    cache = DecodeCache(SCENARIO)
    raw = PageFormat.standard(heads=2, tokens=16, head_dim=16, dtype="bfloat16")
    assert cache.format != raw
    assert all(isinstance(region, Region) for region in cache.description.regions)
