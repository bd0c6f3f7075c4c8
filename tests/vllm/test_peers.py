"""Which peers are served, which are refused, and what is said: kvpd and stock engines side by side.

Engines meet in several pairs; a decoder can have any number of prefills.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.checks import Colocated
from tests.vllm.client import EngineOptions, EngineProcess
from tests.vllm.model import ModelShape
from tests.vllm.pair import HandOver, decode, kvpd_transfer, prefill, prompts, stock_transfer

SHAPE = ModelShape(kv_heads=2, head_dim=64)
BLOCK = 16
OTHER_NAME = "TRITON_ATTN"
MOST = 4
# Of engines whose blocks are longer than those of the others.
BLOCKS = dict.fromkeys(("p_kvpd_cut", "d_kvpd_cut_alike", "d_kvpd_long"), 2 * BLOCK)

# name -> backend, transfer, backend name. p_ engines prefill, d_ engines decode.
ENGINES: dict[str, tuple[str, dict[str, Any], str | None]] = {
    "p_stock": ("standard", stock_transfer("kv_producer"), None),
    "p_stock_other_name": ("standard", stock_transfer("kv_producer"), OTHER_NAME),
    "p_kvpd": ("standard", kvpd_transfer("kv_producer"), None),
    "p_kvpd_other_name": ("standard", kvpd_transfer("kv_producer"), OTHER_NAME),
    "p_kvpd_lies": ("standard", kvpd_transfer("kv_producer"), None),
    "p_kvpd_shuffled": ("shuffled", kvpd_transfer("kv_producer"), None),
    # Kernels for 16 tokens, in blocks of 32 or 16.
    "p_kvpd_cut": ("cut", kvpd_transfer("kv_producer"), None),
    "d_kvpd_cut": ("cut", kvpd_transfer("kv_consumer", enforce_handshake_compat=False), None),
    "d_kvpd_cut_alike": ("cut", kvpd_transfer("kv_consumer"), None),
    "d_stock": ("standard", stock_transfer("kv_consumer"), None),
    "d_kvpd": ("standard", kvpd_transfer("kv_consumer"), None),
    "d_kvpd_long": ("standard", kvpd_transfer("kv_consumer"), None),
    # vLLM repacks whatever reaches a backend of this name from one of another name.
    "d_kvpd_repacks": ("standard", kvpd_transfer("kv_consumer"), "CPU_ATTN"),
    "d_kvpd_lenient": (
        "standard",
        kvpd_transfer("kv_consumer", enforce_handshake_compat=False),
        None,
    ),
    "d_kvpd_strict": ("standard", kvpd_transfer("kv_consumer", require_tagged_peers=True), None),
    "d_kvpd_shuffled": (
        "shuffled",
        kvpd_transfer("kv_consumer", page_format_conversion=True, enforce_handshake_compat=False),
        None,
    ),
    "d_kvpd_shuffled_off": (
        "shuffled",
        kvpd_transfer(
            "kv_consumer", enforce_handshake_compat=False, kv_load_failure_policy="recompute"
        ),
        None,
    ),
}


class Engines:
    """Engines by name, started when asked for; those not asked for the longest are ended."""

    def __init__(self, model: Path, directory: Path) -> None:
        self.directory = directory
        self._model = model
        self._running: dict[str, EngineProcess] = {}

    def start(self, *names: str) -> None:
        for name in names:
            engine = self._running.pop(name, None) or self._new(name)
            self._running[name] = engine  # last again
        idle = [name for name in self._running if name not in names]
        for name in idle[: max(0, len(self._running) - MOST)]:
            self._running.pop(name).close()

    def _new(self, name: str) -> EngineProcess:
        backend, transfer, backend_name = ENGINES[name]
        options = replace(
            EngineOptions(self._model, backend, transfer=transfer),
            backend_name=backend_name,
            block_size=BLOCKS.get(name, BLOCK),
        )
        return EngineProcess(name, options, self.directory)

    def __getitem__(self, name: str) -> EngineProcess:
        if name not in self._running:
            self.start(name)
        return self._running[name]

    def hand_over(self, source: str, target: str, batch: list[list[int]]) -> HandOver:
        self.start(source, target)
        # Both are up before the lease of the prefilled blocks begins.
        _ = self[source].facts, self[target].facts
        return decode(self[target], prefill(self[source], batch), self.directory)

    def said(self, target: str, source: str) -> list[str]:
        """What the decoder logged about this peer, in messages of several lines."""
        engine_id = self[source].call(
            "evaluate", source="result = engine.connector_worker().engine_id"
        )
        lines = self[target].log.splitlines()
        return [line for line in lines if f"peer {engine_id}" in line]

    def knows(self, target: str, source: str) -> bool:
        """Whether the decoder registered anything of this peer."""
        engine_id = self[source].call(
            "evaluate", source="result = engine.connector_worker().engine_id"
        )
        found = self[target].call(
            "evaluate",
            source=f"""
worker, peer = engine.connector_worker(), {engine_id!r}
result = [name for name in (
    "_remote_agents", "dst_xfer_side_handles", "dst_num_blocks", "tp_mappings",
    "kv_caches_base_addr",
) if peer in getattr(worker, name)]
""",
        )
        return bool(found)

    def close(self) -> None:
        for engine in self._running.values():
            engine.close()


@pytest.fixture(scope="module")
def engines(
    model_of: Callable[[ModelShape], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engines]:
    engines = Engines(model_of(SHAPE), tmp_path_factory.mktemp("engines"))
    yield engines
    engines.close()


@pytest.fixture(scope="module")
def batch() -> list[list[int]]:
    return prompts(2, blocks=3, block_size=BLOCK, seed=3)


@pytest.fixture(scope="module")
def expected(colocated: Colocated, batch: list[list[int]]) -> list[list[int]]:
    return colocated(SHAPE, BLOCK, batch)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        pytest.param("p_kvpd", "d_kvpd", marks=pytest.mark.core),
        # Backends may have different names when the pages are equal; stock would refuse.
        ("p_kvpd_other_name", "d_kvpd"),
        pytest.param("p_kvpd", "d_kvpd_repacks", marks=pytest.mark.core),
        # A tag is skipped by a stock decoder.
        ("p_kvpd", "d_stock"),
        ("p_stock", "d_kvpd"),
        ("p_kvpd", "d_kvpd_strict"),
        # The digests differ, and the operator told stock not to compare them.
        ("p_stock_other_name", "d_kvpd_lenient"),
        ("p_kvpd", "d_kvpd_shuffled"),
        ("p_kvpd_cut", "d_kvpd_cut_alike"),
    ],
)
def test_served(
    source: str,
    target: str,
    engines: Engines,
    batch: list[list[int]],
    expected: list[list[int]],
) -> None:
    result = engines.hand_over(source, target, batch)
    assert list(result.tokens.values()) == expected
    assert engines.knows(target, source)


@pytest.mark.parametrize(
    ("source", "target", "codes"),
    [
        # Untagged, and our pages are not what stock assumes.
        pytest.param("p_stock", "d_kvpd_shuffled", ["untagged-peer"], marks=pytest.mark.core),
        ("p_stock", "d_kvpd_strict", ["untagged-peer"]),
        ("p_stock_other_name", "d_kvpd", ["stock-digest"]),
        # Stock's digest leaves the block size out.
        pytest.param("p_stock", "d_kvpd_long", ["block-size"], marks=pytest.mark.core),
        # The kernels' blocks are alike, but a block of the scheduler's is two of them there.
        ("p_kvpd_cut", "d_kvpd_cut", ["blocks-not-whole"]),
        # Convertible in principle, out of scope in this direction; the digest check is off here.
        ("p_kvpd_shuffled", "d_kvpd_lenient", ["conversion-disabled", "pair-out-of-scope"]),
    ],
)
def test_refused_with_every_reason_once_per_peer(
    source: str, target: str, codes: list[str], engines: Engines, batch: list[list[int]]
) -> None:
    before = engines[target].call("metrics")
    for _ in range(2):
        result = engines.hand_over(source, target, batch)
        assert set(result.finish_reasons.values()) == {"error"}, result
    assert not engines.knows(target, source)
    assert len([line for line in engines.said(target, source) if "is refused" in line]) == 1
    after = engines[target].call("metrics")
    for code in codes:
        assert f"{code}: " in engines[target].log
        key = f"vllm:kvpd_refusals_total reason={code}"
        assert after[key] > before.get(key, 0)


@pytest.mark.core
def test_a_tag_that_contradicts_its_metadata_is_refused_at_the_handshake(
    engines: Engines, batch: list[list[int]]
) -> None:
    """What the prefill sends is changed on its way out: the strides of the metadata, not the tag.

    Field by field: test_judgement.py.
    """
    engines["p_kvpd_lies"].call(
        "evaluate",
        source="""
import msgspec
# The listener thread serves what lies in this dict, by rank.
(served, *_) = engine.scheduler.connector.connector_scheduler._nixl_handshake_listener_t._args
for rank, raw in served.items():
    payload = msgspec.msgpack.decode(raw)
    metadata = msgspec.msgpack.decode(payload["agent_metadata_bytes"])
    assert metadata["kvpd"]
    metadata["block_strides"] = [2 * stride for stride in metadata["block_strides"]]
    payload["agent_metadata_bytes"] = msgspec.msgpack.encode(metadata)
    served[rank] = msgspec.msgpack.encode(payload)
""",
    )
    for target in ("d_kvpd_shuffled", "d_kvpd_lenient"):
        result = engines.hand_over("p_kvpd_lies", target, batch)
        assert set(result.finish_reasons.values()) == {"error"}
        assert not engines.knows(target, "p_kvpd_lies")
        (said,) = engines.said(target, "p_kvpd_lies")
        assert "is refused: tag-contradicts-metadata: block_strides" in said
        key = "vllm:kvpd_refusals_total reason=tag-contradicts-metadata"
        assert engines[target].call("metrics")[key] > 0


def test_another_engine_at_the_peers_address(engines: Engines, batch: list[list[int]]) -> None:
    """What a side channel at its default address comes to, where both run on one host each."""
    engines.start("p_kvpd", "d_kvpd")
    (request,) = prefill(engines["p_kvpd"], batch[:1])
    request["kv_transfer_params"] |= {"remote_engine_id": "elsewhere"}
    decoder = engines["d_kvpd"]
    done = decoder.run([request])
    assert done[request["id"]]["finish_reason"] == "error"
    (said,) = [line for line in decoder.log.splitlines() if "peer elsewhere is refused" in line]
    assert "engine-id: the request names engine 'elsewhere' at 127.0.0.1:" in said
    assert "VLLM_NIXL_SIDE_CHANNEL_HOST" in said and "VLLM_NIXL_SIDE_CHANNEL_PORT" in said
    assert decoder.call("metrics")["vllm:kvpd_refusals_total reason=engine-id"] == 1


@pytest.mark.core
def test_recompute_policy_is_respected(
    engines: Engines, batch: list[list[int]], expected: list[list[int]]
) -> None:
    """Refused, conversion being off; the decoder computes the prompt itself, on its own pages."""
    result = engines.hand_over("p_kvpd", "d_kvpd_shuffled_off", batch)
    assert list(result.tokens.values()) == expected
    assert not engines.knows("d_kvpd_shuffled_off", "p_kvpd")
    assert "conversion-disabled: " in engines["d_kvpd_shuffled_off"].log


def test_a_stock_decoder_refuses_our_shuffled_prefill(
    engines: Engines, batch: list[list[int]]
) -> None:
    """It cannot know what the pages are, so the digest that we send must not equal its own."""
    result = engines.hand_over("p_kvpd_shuffled", "d_stock", batch)
    assert set(result.finish_reasons.values()) == {"error"}
    assert "NIXL compatibility hash mismatch" in engines["d_stock"].log


def test_an_untagged_peer_is_accepted_with_one_warning_and_a_metric(
    engines: Engines, batch: list[list[int]]
) -> None:
    for _ in range(2):
        engines.hand_over("p_stock", "d_kvpd", batch)
    said = [line for line in engines.said("d_kvpd", "p_stock") if "untagged-peer" in line]
    assert len([line for line in said if "WARNING" in line]) == 1
    assert engines["d_kvpd"].call("metrics")["vllm:kvpd_untagged_peers_total"] == 1
