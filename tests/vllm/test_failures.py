"""Peers that die, reads that fail or never end, aborts, and leases that run out.

What makes rare timings happen is a fake before real NIXL (fakes.py); everything else is real.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.vllm.checks import Colocated, checked_hand_over, page_shape, until
from tests.vllm.client import EngineProcess, free_port
from tests.vllm.model import ModelShape
from tests.vllm.pair import Pair, kvpd_transfer, pair_options, prompts, stock_transfer

SHAPE = ModelShape(kv_heads=2, head_dim=64)
BLOCK = 16
PAGES = page_shape(SHAPE, BLOCK)


def pair_of(model: Path, directory: Path, prefill: dict[str, Any], decode: dict[str, Any]) -> Pair:
    options = pair_options(
        model,
        "standard",
        "shuffled",
        kvpd_transfer("kv_producer", **prefill),
        kvpd_transfer("kv_consumer", page_format_conversion=True, **decode),
    )
    return Pair(*options, directory)


def evaluate(engine: EngineProcess, source: str) -> Any:
    return engine.call("evaluate", source=f"worker = engine.connector_worker()\n{source}")


def control(engine: EngineProcess, **settings: object) -> None:
    """Set attributes of the fake."""
    lines = [f"worker.fake.{name} = {value!r}" for name, value in settings.items()]
    evaluate(engine, "\n".join(lines))


def free_blocks(engine: EngineProcess) -> int:
    pool = "engine.scheduler.kv_cache_manager.block_pool"
    return int(evaluate(engine, f"result = {pool}.get_num_free_blocks()"))


def until_asked_again(engine: EngineProcess, counter: str, times: int = 20) -> None:
    """Wait until the engine has asked a fake so many times more: it steps, and has its answer."""
    source = f"result = worker.{counter}"
    enough = int(evaluate(engine, source)) + times
    until(lambda: int(evaluate(engine, source)) >= enough)


@pytest.fixture(scope="module")
def pair(
    model_of: Callable[[ModelShape], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    directory = tmp_path_factory.mktemp("failures")
    with pair_of(model_of(SHAPE), directory, {}, {}) as pair:
        evaluate(pair.decode, "from tests.vllm import fakes; fakes.install(worker)")
        yield pair


@pytest.mark.core
def test_aborted_in_flight_keeps_its_blocks_until_the_read_has_ended(
    pair: Pair, colocated: Colocated, tmp_path: Path
) -> None:
    batch = prompts(2, blocks=3, block_size=BLOCK, seed=1)
    idle = free_blocks(pair.decode)
    (request,) = pair.prefill_only(batch[:1])
    control(pair.decode, withhold=True)
    pair.decode.call("submit", requests=[request])
    until(lambda: free_blocks(pair.decode) < idle)
    until(lambda: bool(evaluate(pair.decode, "result = worker._link.num_live")))
    held = free_blocks(pair.decode)
    internal = evaluate(pair.decode, "result = list(worker._recving_metadata)")
    pair.decode.call("abort", ids=[request["id"]])
    until_asked_again(pair.decode, "fake.polls")
    # Something may still write them: neither free nor forgotten.
    assert free_blocks(pair.decode) == held
    assert evaluate(pair.decode, "result = list(worker._recving_metadata)") == internal
    control(pair.decode, withhold=False)
    until(lambda: free_blocks(pair.decode) == idle)
    # The blocks serve the next request.
    expected = colocated(SHAPE, BLOCK, batch[1:])
    checked_hand_over(pair, batch[1:], expected, PAGES, tmp_path)


@pytest.mark.core
def test_a_failed_read_is_never_converted_and_its_blocks_are_invalid(
    pair: Pair, colocated: Colocated, tmp_path: Path
) -> None:
    batch = prompts(2, blocks=3, block_size=BLOCK, seed=2)
    idle = free_blocks(pair.decode)
    requests = pair.prefill_only(batch[:1])
    before = pair.decode.call("metrics")
    control(pair.decode, fail=True, refuse_release=True)
    notices = evaluate(pair.decode, "result = len(worker.fake.notices)")
    pair.decode.call("submit", requests=requests)
    until(lambda: free_blocks(pair.decode) < idle)
    until_asked_again(pair.decode, "fake.refusals")
    # Failed, but its handle cannot be released: DMA may go on, so the blocks are still taken.
    assert free_blocks(pair.decode) < idle
    control(pair.decode, refuse_release=False)
    done = pair.decode.wait([requests[0]["id"]])
    assert done[requests[0]["id"]]["finish_reason"] == "error"
    until(lambda: free_blocks(pair.decode) == idle)
    control(pair.decode, fail=False)
    after = pair.decode.call("metrics")
    assert (
        after["vllm:nixl_num_failed_transfers_total"]
        > (before["vllm:nixl_num_failed_transfers_total"])
    )
    key = "vllm:kvpd_pages_converted_total"
    assert after[key] == before[key]
    # A failed request sends no release notice.
    assert evaluate(pair.decode, "result = len(worker.fake.notices)") == notices
    expected = colocated(SHAPE, BLOCK, batch[1:])
    checked_hand_over(pair, batch[1:], expected, PAGES, tmp_path)


@pytest.mark.core
def test_a_second_request_of_one_prefill_is_not_read(
    pair: Pair, colocated: Colocated, tmp_path: Path
) -> None:
    """``n`` above 1, or a client that asks again: the first one's notice freed the blocks."""
    batch = prompts(2, blocks=3, block_size=BLOCK, seed=12)
    expected = colocated(SHAPE, BLOCK, batch)
    (request,) = pair.prefill_only(batch[:1])
    checked = pair.decode_only([request])
    assert list(checked.tokens.values()) == expected[:1]
    # Somebody else's prefill takes the blocks.
    other = pair.prefill_only(batch[1:])
    again = request | {"id": "again"}
    before = pair.decode.call("metrics")
    pair.decode.call("submit", requests=[again])
    assert pair.decode.wait(["again"])["again"]["finish_reason"] == "error"
    assert "every request needs a prefill of its own" in pair.decode.log
    after = pair.decode.call("metrics")
    counted = "vllm:kvpd_second_readers_total"
    assert after[counted] == before[counted] + 1
    # Nothing expired, and nothing failed on its way.
    for name in ("vllm:nixl_num_kv_expired_reqs_total", "vllm:nixl_num_failed_transfers_total"):
        assert after[name] == before[name], name
    assert list(pair.decode_only(other).tokens.values()) == expected[1:]


@pytest.mark.core
def test_a_failed_read_may_be_asked_for_again(pair: Pair, colocated: Colocated) -> None:
    """No notice was sent for it, so the prefill has the blocks still."""
    batch = prompts(1, blocks=3, block_size=BLOCK, seed=13)
    expected = colocated(SHAPE, BLOCK, batch)
    (request,) = pair.prefill_only(batch)
    control(pair.decode, fail=True)
    pair.decode.call("submit", requests=[request])
    assert pair.decode.wait([request["id"]])[request["id"]]["finish_reason"] == "error"
    control(pair.decode, fail=False)
    assert list(pair.decode_only([request | {"id": "again-2"}]).tokens.values()) == expected


@pytest.mark.core
def test_a_prefill_that_leaves_during_a_request(
    pair: Pair, colocated: Colocated, tmp_path: Path
) -> None:
    """The request ends as it should, and the next one shakes hands again."""
    batch = prompts(2, blocks=3, block_size=BLOCK, seed=8)
    expected = colocated(SHAPE, BLOCK, batch)
    (request,) = pair.prefill_only(batch[:1])
    control(pair.decode, withhold=True)
    pair.decode.call("submit", requests=[request])
    until(lambda: bool(evaluate(pair.decode, "result = worker._link.num_live")))
    # As for a mapped peer that withdraws its memory; there is none to map here.
    evaluate(
        pair.decode,
        "for peer in worker._link._receiver._peers.values(): peer.is_leaving = True",
    )
    until_asked_again(pair.decode, "fake.polls")
    control(pair.decode, withhold=False)
    done = pair.decode.wait([request["id"]])[request["id"]]
    assert (done["finish_reason"], done["tokens"]) == ("length", expected[0])
    checked_hand_over(pair, batch[1:], expected[1:], PAGES, tmp_path)


def test_a_request_is_not_ready_before_it_is_converted(pair: Pair, tmp_path: Path) -> None:
    """While a conversion runs the request is in flight, for the scheduler and for clean-up."""
    (request,) = pair.prefill_only(prompts(1, blocks=3, block_size=BLOCK, seed=3))
    evaluate(
        pair.decode,
        """
from kvpd.convert import ConversionQueue
class FakeCompletion:
    finished = False
    polls = 0
    def done(self):
        FakeCompletion.polls += 1
        return FakeCompletion.finished
worker.completion, worker.submit = FakeCompletion, ConversionQueue.submit
def submit(queue, *arguments):
    worker.submit(queue, *arguments)
    return FakeCompletion()
ConversionQueue.submit = submit
""",
    )
    pair.decode.call("submit", requests=[request])
    until_asked_again(pair.decode, "completion.polls")
    state = evaluate(
        pair.decode,
        f"""
engine_id = next(iter(worker._remote_agents))
result = dict(
    outputs=engine.outputs.get({request["id"]!r}),
    received=len(engine.scheduler.finished_recving_kv_req_ids),
    busy=engine_id in worker._engines_with_inflight_transfers(),
    notices=[n.decode() for n in worker.fake.notices],
)
""",
    )
    assert state["outputs"] is None
    assert state["received"] == 0
    assert state["busy"], "clean-up would take the peer away"
    remote = request["kv_transfer_params"]["remote_request_id"]
    assert f"{remote}:1" not in state["notices"], "the prefill was told too early"
    evaluate(pair.decode, "worker.completion.finished = True")
    pair.decode.wait([request["id"]])
    notices = evaluate(pair.decode, "result = [n.decode() for n in worker.fake.notices]")
    assert notices.count(f"{remote}:1") == 1
    evaluate(
        pair.decode,
        "from kvpd.convert import ConversionQueue\nConversionQueue.submit = worker.submit",
    )


def test_the_prefill_dies_before_the_read(pair: Pair, colocated: Colocated, tmp_path: Path) -> None:
    """Last of the pair's tests: the peer is connected, its process is gone."""
    requests = pair.prefill_only(prompts(1, blocks=3, block_size=BLOCK, seed=4))
    pair.prefill.kill()
    before = pair.decode.pages(tmp_path)
    pair.decode.call("submit", requests=requests)
    done = pair.decode.wait([requests[0]["id"]], seconds=90)
    assert done[requests[0]["id"]]["finish_reason"] == "error"
    assert np.array_equal(pair.decode.pages(tmp_path), before)


def test_dead_before_the_handshake_is_recomputed(
    model_of: Callable[[ModelShape], Path], colocated: Colocated, tmp_path: Path
) -> None:
    batch = prompts(1, blocks=3, block_size=BLOCK, seed=5)
    expected = colocated(SHAPE, BLOCK, batch)
    decode = {"kv_load_failure_policy": "recompute"}
    with pair_of(model_of(SHAPE), tmp_path, {}, decode) as pair:
        requests = pair.prefill_only(batch)
        pair.prefill.kill()
        result = pair.decode_only(requests)
    assert list(result.tokens.values()) == expected


def test_a_lease_that_ran_out_is_not_read(
    model_of: Callable[[ModelShape], Path], colocated: Colocated, tmp_path: Path
) -> None:
    batch = prompts(4, blocks=3, block_size=BLOCK, seed=6)
    expected = colocated(SHAPE, BLOCK, batch)
    lease = {"kv_lease_duration": 18}
    with pair_of(model_of(SHAPE), tmp_path, lease, lease) as pair:
        renewed = pair.prefill_only(batch[:1])
        evaluate(pair.decode, "from tests.vllm import fakes; fakes.install(worker)")

        def read_for_longer_than_the_lease(requests: list[dict[str, Any]]) -> dict[str, Any]:
            control(pair.decode, withhold=True)
            pair.decode.call("submit", requests=requests)
            until(lambda: evaluate(pair.decode, "result = worker._link.num_live") > 0)
            time.sleep(18)
            control(pair.decode, withhold=False)
            return dict(pair.decode.wait([requests[0]["id"]])[requests[0]["id"]])

        # Heartbeats move the deadline of a request that is being read.
        done = read_for_longer_than_the_lease(renewed)
        assert (done["finish_reason"], done["tokens"]) == ("length", expected[0])
        late, slow = pair.prefill_only(batch[1:2]), pair.prefill_only(batch[2:3])
        before = pair.decode.call("metrics")
        # Connected and reading in time, but the read ends after the deadline.
        evaluate(pair.decode, "from tests.vllm import fakes; fakes.lose_heartbeats(worker)")
        assert read_for_longer_than_the_lease(slow)["finish_reason"] == "error"
        # Asked for after the deadline: not even begun.
        pair.decode.call("submit", requests=late)
        done = pair.decode.wait([late[0]["id"]])
        assert done[late[0]["id"]]["finish_reason"] == "error"
        assert "the lease of its remote blocks has run out" in pair.decode.log
        after = pair.decode.call("metrics")
        key = "vllm:kvpd_pages_converted_total"
        assert after[key] == before[key]
        assert after["vllm:nixl_num_kv_expired_reqs_total"] >= 1
        checked_hand_over(pair, batch[3:], expected[3:], PAGES, tmp_path)


def test_a_prefill_that_comes_back_at_its_address(
    model_of: Callable[[ModelShape], Path], colocated: Colocated, tmp_path: Path
) -> None:
    """The new engine is judged and read; what was prepared for the old one is let go."""
    batch = prompts(2, blocks=2, block_size=BLOCK, seed=8)
    expected = colocated(SHAPE, BLOCK, batch)
    port = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}
    prefill_options, decode_options = pair_options(
        model_of(SHAPE),
        "standard",
        "shuffled",
        kvpd_transfer("kv_producer"),
        kvpd_transfer("kv_consumer", page_format_conversion=True),
    )
    prefill_options = replace(prefill_options, environment=port)
    with Pair(prefill_options, decode_options, tmp_path) as pair:
        checked_hand_over(pair, batch, expected, PAGES, tmp_path)
        old = evaluate(pair.decode, "result = list(worker._remote_agents)")
        pair.prefill.close()
        pair.prefill = EngineProcess("prefill", prefill_options, tmp_path)
        with pair.prefill:
            checked_hand_over(pair, batch, expected, PAGES, tmp_path)
            pair.hand_over(prompts(1, blocks=2, block_size=BLOCK, seed=9))
        known = evaluate(
            pair.decode, "result = [list(worker._remote_agents), list(worker._link._peers)]"
        )
    assert len(known[0]) == 1
    assert known[0] == known[1]
    assert not set(old) & set(known[0])


@pytest.mark.parametrize("end", ["kill", "close"])
@pytest.mark.parametrize(
    ("prefill", "decode_backend"),
    [
        pytest.param(kvpd_transfer, "shuffled", id="convert", marks=pytest.mark.core),
        pytest.param(kvpd_transfer, "standard", id="identical"),
        pytest.param(stock_transfer, "standard", id="untagged"),
    ],
)
def test_a_prefill_that_comes_back_under_its_engine_id(
    prefill: Callable[..., dict[str, Any]],
    decode_backend: str,
    end: str,
    model_of: Callable[[ModelShape], Path],
    colocated: Colocated,
    tmp_path: Path,
) -> None:
    """NIXL goes on to say that it knows the old one; at most one request may find out."""
    batch = prompts(5, blocks=3, block_size=BLOCK, seed=14)
    expected = colocated(SHAPE, BLOCK, batch)
    port = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}
    prefill_options, decode_options = pair_options(
        model_of(SHAPE),
        "standard",
        decode_backend,
        prefill("kv_producer") | {"engine_id": "prefill-0"},
        kvpd_transfer("kv_consumer", page_format_conversion=True),
    )
    prefill_options = replace(prefill_options, environment=port)
    with Pair(prefill_options, decode_options, tmp_path) as pair:
        assert list(pair.hand_over(batch[:1]).tokens.values()) == expected[:1]
        for round_, first in enumerate((1, 3)):
            getattr(pair.prefill, end)()
            pair.prefill.close()
            pair.prefill = EngineProcess(f"prefill-{round_}", prefill_options, tmp_path)
            tokens = []
            for prompt in batch[first : first + 2]:
                tokens += list(pair.hand_over([prompt]).tokens.values())
            # The first may have found out.
            assert tokens[0] in (expected[first], []), round_
            assert tokens[1] == expected[first + 1], round_
        known = evaluate(pair.decode, "result = [len(worker._remote_agents), worker._lost.known()]")
        assert known == [1, []]
        pair.prefill.close()


@pytest.mark.parametrize(
    "decode_backend", [pytest.param("shuffled", marks=pytest.mark.core), "standard"]
)
def test_a_connection_that_is_lost_while_the_prefill_lives(
    decode_backend: str,
    model_of: Callable[[ModelShape], Path],
    colocated: Colocated,
    tmp_path: Path,
) -> None:
    """One request fails at most, and the next ones are served over a new connection."""
    batch = prompts(5, blocks=3, block_size=BLOCK, seed=15)
    expected = colocated(SHAPE, BLOCK, batch)
    lease = {"kv_lease_duration": 30}  # a heartbeat every 5 s
    options = pair_options(
        model_of(SHAPE),
        "standard",
        decode_backend,
        kvpd_transfer("kv_producer", **lease),
        kvpd_transfer("kv_consumer", page_format_conversion=True, **lease),
    )
    lose = "from tests.vllm import fakes; fakes.lose_connections(worker)"
    with Pair(*options, tmp_path) as pair:
        assert list(pair.hand_over(batch[:1]).tokens.values()) == expected[:1]
        evaluate(pair.decode, lose)
        assert list(pair.hand_over(batch[1:2]).finish_reasons.values()) == ["error"]
        # Its handshake brought a connection that works.
        assert list(pair.hand_over(batch[2:4]).tokens.values()) == expected[2:4]
        # While a request queues a heartbeat finds out, and none fails.
        requests = pair.prefill_only(batch[4:])
        evaluate(
            pair.decode,
            f"""
{lose}
pool = engine.scheduler.kv_cache_manager.block_pool
engine.taken = pool.get_new_blocks(pool.get_num_free_blocks())
""",
        )
        pair.decode.call("submit", requests=requests)
        until(lambda: not evaluate(pair.decode, "result = worker.nixl_wrapper._is_lost"))
        evaluate(
            pair.decode,
            "pool = engine.scheduler.kv_cache_manager.block_pool\npool.free_blocks(engine.taken)",
        )
        assert pair.decode.wait([requests[0]["id"]])[requests[0]["id"]]["tokens"] == expected[4]
        assert evaluate(pair.decode, "result = worker._lost._losses") == {}
        assert "It is let go of; the next request shakes hands again" in pair.decode.log


def test_a_dead_prefill_is_not_asked_by_every_request(
    model_of: Callable[[ModelShape], Path], tmp_path: Path
) -> None:
    """Each handshake with it takes seconds of the one thread that all peers' handshakes share."""
    with pair_of(model_of(SHAPE), tmp_path, {}, {}) as pair:
        pair.hand_over(prompts(1, blocks=3, block_size=BLOCK, seed=16))
        requests = pair.prefill_only(prompts(6, blocks=3, block_size=BLOCK, seed=17))
        evaluate(
            pair.decode,
            """
import zmq
from kvpd.vllm.adapter.worker import NixlPullConnectorWorker
worker.asked = 0
def silent(self, *arguments, **options):
    self.asked += 1
    raise zmq.Again()
NixlPullConnectorWorker._nixl_handshake = silent
""",
        )
        pair.prefill.kill()
        for request in requests:
            pair.decode.call("submit", requests=[request])
            done = pair.decode.wait([request["id"]], seconds=90)
            assert done[request["id"]]["finish_reason"] == "error"
        # The first found out by its READ, the second asked, the others came within the pause.
        assert evaluate(pair.decode, "result = worker.asked") <= 2
