"""An exception at any call that the connector makes for a request ends that request at most.

What is called is found by watching one request from its handshake to its end (raising.py); then
each function raises once while a request is handed over, and the next request has to be right.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.vllm.checks import Colocated, until
from tests.vllm.client import EngineProcess
from tests.vllm.model import ModelShape
from tests.vllm.pair import Pair, kvpd_transfer, pair_options, prompts

SHAPE = ModelShape(kv_heads=2, head_dim=64)
BLOCK = 16
# Each hand-over shakes hands anew, so that all of it is called again.
FORGET = """
worker = engine.connector_worker()
for engine_id in list(worker._remote_agents):
    worker._cleanup_remote_engine(engine_id, log_eviction=False)
"""
LEFT = """
worker = engine.connector_worker()
scheduler = engine.scheduler.connector.connector_scheduler
pool = engine.scheduler.kv_cache_manager.block_pool
result = [
    *worker._leased, *worker._recving_metadata, *worker._recving_transfers, *worker._recv_failures,
    *worker._readers._remotes, *scheduler._asked, *scheduler._refused, worker._link.num_live,
    pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
]
result = [item for item in result if item]
"""


@pytest.mark.parametrize(
    ("decode_backend", "options", "least"),
    [
        pytest.param("shuffled", {"page_format_conversion": True}, 60, id="in-place"),
        pytest.param(
            "shuffled",
            {"page_format_conversion": True, "slab_bytes": 1 << 20},
            70,
            id="staged",
            marks=pytest.mark.slow,
        ),
        pytest.param("standard", {}, 25, id="identical"),
    ],
)
@pytest.mark.core
def test_an_exception_anywhere_ends_one_request_at_most(
    decode_backend: str,
    options: dict[str, object],
    least: int,
    model_of: Callable[[ModelShape], Path],
    colocated: Colocated,
    tmp_path: Path,
) -> None:
    batch = prompts(2, blocks=2, block_size=BLOCK, seed=31)
    expected = colocated(SHAPE, BLOCK, batch)
    sides = pair_options(
        model_of(SHAPE),
        "standard",
        decode_backend,
        kvpd_transfer("kv_producer", kv_lease_duration=300),
        kvpd_transfer("kv_consumer", **options),
        num_blocks=1024,
    )
    with Pair(*sides, tmp_path) as pair:
        functions = watched(pair, batch[0])
        assert len(functions) >= least, functions
        assert any("read" in name for name in functions) and any("judge" in n for n in functions)
        wrong = []
        for name in functions:
            pair.decode.call(
                "evaluate",
                source=FORGET + f"engine.hook = engine.Raise(engine.watch.found[{name!r}])",
            )
            tokens, reason = hand_over(pair, batch[0])
            if reason != "error" and (tokens, reason) != (expected[0], "length"):
                wrong.append([name, "the request", tokens, reason])
            pair.decode.call("evaluate", source="engine.hook.raised or engine.hook.undo()")
            tokens, reason = hand_over(pair, batch[1])
            if (tokens, reason) != (expected[1], "length"):
                wrong.append([name, "the next request", tokens, reason])
        assert not wrong, "\n".join(map(str, wrong))
        until(lambda: not pair.decode.call("evaluate", source=LEFT))
        assert "internal-error" in pair.decode.log


def watched(pair: Pair, prompt: list[int]) -> list[str]:
    """Hand one request over, and name every function that kvpd's code called for it."""
    pair.decode.call(
        "evaluate",
        source="""
from tests.vllm.raising import Raise, Watch
engine.Raise, engine.watch = Raise, Watch()
engine.watch.start()
""",
    )
    hand_over(pair, prompt)
    found = pair.decode.call("evaluate", source="result = engine.watch.stop()")
    return [str(name) for name in found]


def hand_over(pair: Pair, prompt: list[int]) -> tuple[list[int], str]:
    (request,) = pair.prefill_only([prompt])
    done = pair.decode.run([request], seconds=60)[request["id"]]
    return done["tokens"], done["finish_reason"]


def test_the_watch_can_fail(model_of: Callable[[ModelShape], Path], tmp_path: Path) -> None:
    """Where nothing holds an exception, it does end the engine: in what holds all others."""
    sides = pair_options(
        model_of(SHAPE),
        "standard",
        "shuffled",
        kvpd_transfer("kv_producer"),
        kvpd_transfer("kv_consumer", page_format_conversion=True),
    )
    with Pair(*sides, tmp_path) as pair:
        engine: EngineProcess = pair.decode
        engine.call(
            "evaluate",
            source="""
from tests.vllm.raising import Raise
from kvpd.vllm.adapter.proving import ProvingWorker
Raise(ProvingWorker._alone.__wrapped__)
""",
        )
        (request,) = pair.prefill_only(prompts(1, blocks=2, block_size=BLOCK, seed=1))
        with pytest.raises(Exception, match="injected by the test"):
            engine.run([request], seconds=60)
