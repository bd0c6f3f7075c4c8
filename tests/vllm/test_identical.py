"""Equal page formats take stock's path: the decoder asks the same things of NIXL, call for call.

Over the whole life of a peer: handshake, reads, a full prefix hit, heartbeats while a request
queues for longer than its lease, an abort before anything is scheduled, a lease that ends unread,
removal and a new handshake, shutdown.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.checks import Colocated, until
from tests.vllm.client import EngineProcess
from tests.vllm.model import ModelShape
from tests.vllm.pair import Pair, kvpd_transfer, pair_options, prompts, stock_transfer

SHAPE = ModelShape(kv_heads=2, head_dim=64)
BLOCK = 16
BATCH = prompts(5, blocks=3, block_size=BLOCK, seed=7)
# Heartbeats come every 2 s.
LEASE_SECONDS = 12
Transfer = Callable[..., dict[str, Any]]


@dataclass(frozen=True)
class Life:
    """What each side asked of NIXL, and the decoder's tokens.

    Attributes:
        heartbeats: to whom and how; how many and when is the clock's affair.
        decode: the decoder's calls without them.
    """

    prefill: list[Any]
    decode: list[Any]
    heartbeats: set[str]
    tokens: list[list[int]]


def evaluate(engine: EngineProcess, source: str) -> Any:
    return engine.call("evaluate", source=f"worker = engine.connector_worker()\n{source}")


def num_calls(engine: EngineProcess, *call: str) -> int:
    source = f"""
calls = worker.nixl_wrapper.calls
result = sum(call[0] == {call[0]!r} and {call[-1]!r} in str(call) for call in calls)
"""
    return int(evaluate(engine, source))


def queue(engine: EngineProcess, request: dict[str, Any]) -> None:
    """Submit a request for which there are no blocks, and see it wait until it is heard of."""
    evaluate(
        engine,
        """
pool = engine.scheduler.kv_cache_manager.block_pool
engine.taken = pool.get_new_blocks(pool.get_num_free_blocks())
""",
    )
    before = num_calls(engine, "send_notif", "HB:")
    engine.call("submit", requests=[request])
    until(lambda: num_calls(engine, "send_notif", "HB:") > before, LEASE_SECONDS)


def let_in(engine: EngineProcess) -> None:
    evaluate(engine, "engine.scheduler.kv_cache_manager.block_pool.free_blocks(engine.taken)")


def life(pair: Pair) -> Life:
    """One after the other, so that both arms come to the same order of calls."""
    prefill, decode = pair.prefill, pair.decode

    def prefilled(prompt: list[int]) -> dict[str, Any]:
        # A notice that is still under way would decide which blocks are free.
        until(lambda: evaluate(prefill, "result = not worker._reqs_to_send"), 3 * LEASE_SECONDS)
        (request,) = pair.prefill_only([prompt])
        return request

    tokens = []
    for prompt in BATCH[:3]:
        tokens += list(pair.decode_only([prefilled(prompt)]).tokens.values())
    # A full hit, which models get that compute their last token on the decoder.
    evaluate(
        decode,
        "scheduler = engine.scheduler.connector.connector_scheduler\n"
        "scheduler._get_remote_prefill_token_count = lambda num_tokens: num_tokens - 1",
    )
    tokens += list(pair.decode_only([prefilled(BATCH[0])]).tokens.values())
    # A request that queues for longer than its lease: heartbeats renew it.
    request = prefilled(BATCH[3])
    queue(decode, request)
    sent = num_calls(decode, "send_notif", "HB:")
    until(
        lambda: num_calls(decode, "send_notif", "HB:") >= sent + LEASE_SECONDS // 2,
        3 * LEASE_SECONDS,
    )
    let_in(decode)
    tokens.append(decode.wait([request["id"]])[request["id"]]["tokens"])
    # Aborted before it is scheduled: the prefill is told, and nothing is read.
    request = prefilled(BATCH[4])
    queue(decode, request)
    decode.call("abort", ids=[request["id"]])
    until(lambda: num_calls(decode, "send_notif", "notice:1") == 2)
    let_in(decode)
    # Nobody asks for it, and its lease ends before the next one is prefilled.
    prefilled(BATCH[4])
    evaluate(
        decode,
        """
for engine_id, agents in list(worker._remote_agents.items()):
    worker._cleanup_remote_engine(engine_id, log_eviction=False)
    assert not any(worker.nixl_wrapper.check_remote_metadata(name) for name in agents.values())
""",
    )
    tokens += list(pair.decode_only([prefilled(BATCH[4])]).tokens.values())
    source = "agent = worker.nixl_wrapper\nworker.shutdown()\nresult = agent.calls"
    calls = evaluate(decode, source)
    heartbeats = {str(call).split("#")[0] + str(call[2:]) for call in calls if "HB:" in str(call)}
    others = [call for call in calls if "HB:" not in str(call)]
    return Life(evaluate(prefill, source), others, heartbeats, tokens)


def life_of(
    model: Path,
    directory: Path,
    backend: str,
    layout: str,
    prefill: Transfer,
    decode: Transfer,
    **keys: Any,
) -> Life:
    lease = {"kv_lease_duration": LEASE_SECONDS}
    options = pair_options(
        model,
        backend,
        backend,
        prefill("kv_producer", **lease),
        decode("kv_consumer", **lease, **keys),
        enable_prefix_caching=True,
        record_nixl=True,
        environment={"VLLM_KV_CACHE_LAYOUT": layout},
    )
    with Pair(*options, directory) as pair:
        return life(pair)


@pytest.mark.parametrize(
    ("backend", "layout", "arms"),
    [
        pytest.param("standard", "LBHNC", ("identical", "untagged"), marks=pytest.mark.core),
        ("shuffled", "LHBNC", ("identical",)),
    ],
)
def test_nixl_calls_equal_stock(
    backend: str,
    layout: str,
    arms: tuple[str, ...],
    model_of: Callable[[ModelShape], Path],
    colocated: Colocated,
    tmp_path: Path,
) -> None:
    order = [0, 1, 2, 0, 3, 4]
    expected = colocated(SHAPE, BLOCK, BATCH)
    model = model_of(SHAPE)
    stock = life_of(model, tmp_path, backend, layout, stock_transfer, stock_transfer)
    names = [call[0] for call in stock.decode]
    # What the recorder did not see was not compared.
    assert (names.count("add_remote_agent"), names.count("make_prepped_xfer")) == (2, 5)
    assert (names.count("remove_remote_agent"), names.count("send_notif")) == (2, 2)
    assert len(stock.heartbeats) == 1
    for arm in arms:
        prefill = kvpd_transfer if arm == "identical" else stock_transfer
        ours = life_of(
            model, tmp_path, backend, layout, prefill, kvpd_transfer, page_format_conversion=True
        )
        assert ours.tokens == [expected[index] for index in order], arm
        assert [call[0] for call in ours.decode] == [call[0] for call in stock.decode], arm
        assert ours.decode == stock.decode, arm
        assert ours.prefill == stock.prefill, arm
        assert ours.heartbeats == stock.heartbeats, arm
