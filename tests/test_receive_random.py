"""The receive pipeline under random orders of events, with its promises checked to the byte."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("torch")
pytest.importorskip("nixl")

from kvpd.cli.demo.oracle import compare
from kvpd.request import Failed, Outcome, Ready
from tests.receive_bench import SCENARIO, A, B, C, Maker

pytest_plugins = ("tests.receive_fixtures",)


@pytest.mark.parametrize("seed", range(12))
def test_random_orders_of_events(make: Maker, placement: str, seed: int) -> None:
    """Every request ends once, in memory nobody writes; only what was read is converted."""
    rng = random.Random(seed)
    bench = make(placement)
    peer = bench.receiver.add_peer(bench.handshake)
    live: set[str] = set()
    torn: set[str] = set()
    aborted: set[str] = set()
    blocks = {name: sorted(ids) for name, ids in SCENARIO.decode_ids().items()}
    converted: dict[str, int] = {}
    num_ready = 0

    def settle(outcomes: list[Outcome]) -> None:
        nonlocal num_ready
        for outcome in outcomes:
            live.remove(outcome.request_id)  # a second outcome would raise
            times = sum(sorted(ids) == blocks[outcome.request_id] for ids in bench.queue.converted)
            fresh = times - converted.get(outcome.request_id, 0)
            converted[outcome.request_id] = times
            if isinstance(outcome, Ready):
                num_ready += 1
                assert fresh == 1
                torn.discard(outcome.request_id)
                aborted.discard(outcome.request_id)
            else:
                assert isinstance(outcome, Failed)
                assert sorted(outcome.invalid_blocks) == blocks[outcome.request_id]
                # An abort can meet a conversion that runs; it ends, and the blocks are not used.
                assert fresh == 0 or (fresh == 1 and outcome.code == "aborted")
                (aborted if fresh else torn).add(outcome.request_id)

    def toggle(owner: object, name: str) -> None:
        setattr(owner, name, not getattr(owner, name))

    for _ in range(60):
        event = rng.randrange(9)
        name = rng.choice((A, B, C))
        if event <= 2 and name not in live:
            late = rng.choice((None, None, bench.now + rng.choice((0.0, 1.0, 3.0))))
            bench.start(name, peer, deadline=late)
            live.add(name)
        elif event == 3 and name in live and bench.receiver.num_live:
            if name in bench.receiver._live:
                bench.receiver.abort(name)
        elif event == 4:
            toggle(bench.agent, rng.choice(("holds", "fails", "refuses_release")))
        elif event == 5:
            toggle(bench.queue, "holds")
        elif event == 6:
            bench.now += 1.0
        settle(bench.poll(rng.randrange(3)))
    bench.agent.holds = bench.agent.fails = bench.agent.refuses_release = False
    bench.queue.holds = False
    settle(bench.run())
    assert not live and bench.receiver.num_live == 0
    assert len(bench.agent.sent) == num_ready

    # Everything works again, and no byte outside the blocks was touched in all this.
    for name in (A, B, C):
        bench.start(name, peer)
        live.add(name)
    settle(bench.run())
    assert not torn and not aborted
    bench.check(A, B, C)


@pytest.mark.parametrize("seed", range(6))
def test_staged_failures_never_touch_the_cache(make: Maker, seed: int) -> None:
    """Whatever fails before its conversion leaves the decoder's memory as it was."""
    rng = random.Random(seed)
    bench = make("staged")
    peer = bench.receiver.add_peer(bench.handshake)
    bench.agent.holds = True
    for name in (A, B, C):
        bench.start(name, peer, deadline=rng.choice((None, bench.now + 1)))
    order = [A, B, C]
    rng.shuffle(order)
    for name in order:
        way = rng.randrange(3)
        if way == 0 and name in bench.receiver._live:
            bench.receiver.abort(name)
        elif way == 1:
            bench.now += 1
        else:
            bench.agent.fails = True
            bench.poll()
            bench.agent.fails = False
    bench.poll()
    memory = bench.cache.tensor.numpy()
    comparison = compare(memory, SCENARIO, {})
    assert comparison.holds, comparison.first_wrong
    assert bench.queue.converted == []
