"""The receive pipeline: what is served, and what cannot be started.

READs are real NIXL between two agents of this process. What the caches must hold comes from the
demo's oracle, which knows none of kvpd's strides.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("nixl")

import torch

from kvpd import PageFormat, Region, slab_bytes, wire
from kvpd.cli.demo.decode import DecodeCache
from kvpd.cli.demo.oracle import compare
from kvpd.cli.demo.prefill import handshakes, written_memory
from kvpd.cli.demo.scenario import Scenario
from kvpd.errors import PlanError, TransferError
from kvpd.nixl import MemoryRange
from kvpd.receive import Receiver
from kvpd.request import Outcome, Ready
from tests.receive_bench import SCENARIO, A, B, Bench, C, Maker, blocks_of

PAGE_BYTES = 2 * SCENARIO.heads * SCENARIO.tokens * SCENARIO.head_dim * 2

pytest_plugins = ("tests.receive_fixtures",)


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
        assert outcome.num_blocks == pages
        assert outcome.num_bytes == pages * PAGE_BYTES * SCENARIO.layers
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
        # Of one page: equal pages do not pass through a slab.
        slab_bytes=slab_bytes(mine.description.regions, num_pages=1),
        num_slots=1,
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


def refused_starts(bench: Bench) -> dict[str, tuple[Any, ...]]:
    local, remote = bench.scenario.decode_ids(), bench.scenario.prefill_ids()
    decode_blocks, prefill_blocks = bench.scenario.decode_blocks, bench.scenario.prefill_blocks
    free = [block for block in range(decode_blocks) if block not in local[A]]
    return {
        "duplicate-request": (A, free[:1], remote[B][:1]),
        "blocks-in-flight": (B, [free[0], local[A][0]], remote[B]),
        "no-such-block local": (B, [decode_blocks], remote[B][:1]),
        "no-such-block remote": (B, free[:1], [prefill_blocks]),
        "length-mismatch": (B, free[:2], remote[B][:1]),
        "duplicate-block local": (B, [free[0], free[0]], remote[B]),
        "duplicate-block remote": (B, free[:2], [remote[B][0], remote[B][0]]),
        "block-id": (B, [-1], remote[B][:1]),
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
        assert caught.value.field, name
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


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"placement": "nowhere"}, "placement"),
        ({"placement": "staged"}, "slab-size"),
        ({"placement": "staged", "slab_bytes": 1 << 20, "num_slots": 0}, "slab-size"),
        ({"storages": []}, "no-storages"),
    ],
)
def test_options_that_make_no_sense(make: Maker, changes: dict[str, Any], code: str) -> None:
    bench = make("in_place")
    options = {"storages": [bench.cache.tensor], "convert": True, **changes}
    with pytest.raises(PlanError) as caught:
        Receiver(bench.agent, bench.cache.description, **options)
    assert caught.value.code == code


def test_the_oracle_format_is_the_shuffled_one() -> None:
    """The tests above compare pages that differ from the raw ones in every block."""
    cache = DecodeCache(SCENARIO)
    raw = PageFormat.standard(heads=2, tokens=16, head_dim=16, dtype="bfloat16")
    assert cache.format != raw
    assert all(isinstance(region, Region) for region in cache.description.regions)
