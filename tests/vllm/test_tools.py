"""``kvpd inspect`` and ``kvpd check`` on real engines; what `check` says is what then happens.

Engines both prefill and decode, so that a few of them make many pairs. Each pair is checked first,
on running engines; then a prompt is handed over, and the decoder's answer is the oracle.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvpd.cli import main
from tests.vllm.checks import Colocated
from tests.vllm.client import EngineOptions, EngineProcess
from tests.vllm.model import LAYERS, ModelShape
from tests.vllm.pair import decode, kvpd_transfer, prefill, prompts, stock_transfer

pytest.importorskip("zmq")

SHAPE = ModelShape(kv_heads=2, head_dim=64)
WIDE = ModelShape(kv_heads=4, head_dim=64)
BLOCK = 16
MAX_RUNNING = 4
CONVERT = ("--enable-conversion",)
PAGE_BYTES = SHAPE.kv_heads * BLOCK * 2 * SHAPE.head_dim * 2

STOCK, KVPD = stock_transfer("kv_both"), kvpd_transfer("kv_both")
CONVERTING = kvpd_transfer("kv_both", page_format_conversion=True)
OTHER_NAME = {"backend_name": "TRITON_ATTN"}
LHBNC = {"environment": {"VLLM_KV_CACHE_LAYOUT": "LHBNC"}}

# name -> model, backend, connector, anything else.
ENGINES: dict[str, tuple[ModelShape, str, dict[str, Any], dict[str, Any]]] = {
    "stock": (SHAPE, "standard", STOCK, {}),
    "stock_shuffled": (SHAPE, "shuffled", STOCK, {}),
    "stock_other_name": (SHAPE, "standard", STOCK, OTHER_NAME),
    "stock_lhbnc": (SHAPE, "standard", STOCK, LHBNC),
    "stock_shuffled_lhbnc": (SHAPE, "shuffled", STOCK, LHBNC),
    "stock_wide": (WIDE, "standard", STOCK, {}),
    "stock_wide_lhbnc": (WIDE, "standard", STOCK, LHBNC),
    "stock_wide_shuffled_lhbnc": (WIDE, "shuffled", STOCK, LHBNC),
    "kvpd": (SHAPE, "standard", KVPD, {}),
    "kvpd_other_name": (SHAPE, "standard", KVPD, OTHER_NAME),
    "kvpd_converting": (SHAPE, "shuffled", CONVERTING, {}),
}


class Engines:
    """Engines by name, started when first asked for; the last few are kept."""

    def __init__(self, model_of: Callable[[ModelShape], Path], directory: Path) -> None:
        self.directory = directory
        self._model_of = model_of
        self._running: dict[str, EngineProcess] = {}

    def __getitem__(self, name: str) -> EngineProcess:
        if name not in self._running:
            while len(self._running) >= MAX_RUNNING:
                self._running.pop(next(iter(self._running))).close()
            shape, backend, transfer, rest = ENGINES[name]
            options = EngineOptions(self._model_of(shape), backend, transfer=transfer, **rest)
            self._running[name] = EngineProcess(name, options, self.directory)
        else:
            # The one used last is closed last.
            self._running[name] = self._running.pop(name)
        return self._running[name]

    def address(self, name: str) -> str:
        """Where its side channel listens, as vLLM says."""
        source = "from vllm import envs; result = envs.VLLM_NIXL_SIDE_CHANNEL_PORT"
        return f"127.0.0.1:{self[name].call('evaluate', source=source)}"

    def worker(self, name: str, expression: str) -> Any:
        """A value of the engine's connector."""
        source = f"worker = engine.connector_worker(); result = {expression}"
        return self[name].call("evaluate", source=source)

    def close(self) -> None:
        for process in self._running.values():
            process.close()


@pytest.fixture(scope="module")
def engines(
    model_of: Callable[[ModelShape], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engines]:
    engines = Engines(model_of, tmp_path_factory.mktemp("tools"))
    yield engines
    engines.close()


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, Any]:
    status = main([*words, "--json"])
    shown = capsys.readouterr()
    assert shown.err == ""
    return status, json.loads(shown.out)


# ---------------------------------------------------------------------- inspect


@pytest.mark.core
@pytest.mark.parametrize("name", ["stock", "kvpd", "kvpd_converting"])
def test_inspect_shows_what_the_engine_registered(
    name: str, engines: Engines, capsys: pytest.CaptureFixture[str]
) -> None:
    """Against the connector's own tables, asked for inside the engine."""
    address = engines.address(name)
    status, value = printed(capsys, "inspect", address)
    assert status == 0
    facts, metadata = engines[name].facts, value["metadata"]
    assert metadata["engine_id"] == engines.worker(name, "worker.engine_id")
    assert metadata["kv_cache_layout"] == facts["layout"]
    assert [metadata["attn_backend_name"]] == facts["backends"]
    assert metadata["block_lens"] == facts["region_bytes"]
    assert metadata["kv_caches_base_addr"] == engines.worker(
        name, "list(worker.kv_caches_base_addr[worker.engine_id][worker.tp_rank])"
    )
    assert sorted(set(metadata["region_names"])) == facts["layers"]
    summary = value["summary"]
    assert summary["num_layers"] == LAYERS
    assert summary["total_bytes"] == engines.worker(
        name, "sum(a * b for a, b in zip(worker.block_len_per_layer, worker.region_num_blocks))"
    )
    assert summary["connector"] == ("stock" if name == "stock" else "kvpd")
    if name == "stock":
        assert value["tag"] is None
    else:
        assert value["tag"]["body"]["facts"]["release"] == facts["vllm"]
    # NIXL's part of the handshake has keys to the memory; nothing of it comes out.
    assert "agent_metadata" not in metadata


def test_inspect_leaves_the_engine_as_it_was(
    engines: Engines, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also for a rank that it has not, which would end vLLM's listener."""
    address = engines.address("stock")
    assert main(["inspect", address, "--tp-rank", "1"]) == 2
    assert "--tp-size" in capsys.readouterr().err
    assert main(["inspect", engines.address("kvpd"), "--tp-rank", "1"]) == 2
    assert "tensor-parallel size" in capsys.readouterr().err
    for _ in range(3):
        assert main(["inspect", address]) == 0


def test_a_stock_engine_fits_what_it_is_and_what_it_is_not(
    engines: Engines, capsys: pytest.CaptureFixture[str]
) -> None:
    _, value = printed(capsys, "inspect", engines.address("stock"))
    shape = [SHAPE.kv_heads, SHAPE.head_dim]
    fitting = {
        name
        for fit in value["summary"]["fits"]
        for name in fit["formats"]
        if shape in fit["shapes"] and fit["element_bits"] == 16
    }
    assert {"standard", "aiter-shuffle"} <= fitting


@pytest.mark.slow
@pytest.mark.parametrize("name", ["stock_shuffled", "stock_lhbnc", "stock_shuffled_lhbnc"])
def test_two_heads_cannot_be_told_apart_in_any_layout(
    name: str, engines: Engines, capsys: pytest.CaptureFixture[str]
) -> None:
    _, value = printed(capsys, "inspect", engines.address(name))
    names = {n for fit in value["summary"]["fits"] for n in fit["formats"]}
    assert {"standard", "aiter-shuffle"} <= names


# ---------------------------------------------------------------------- check

PAIRS = [
    # prefill, decode, options, exit status, codes
    ("kvpd", "kvpd_converting", CONVERT, 0, []),
    ("kvpd_converting", "kvpd", (), 1, ["conversion-disabled", "pair-out-of-scope"]),
    ("stock", "kvpd", (), 2, ["untagged-peer"]),
    ("stock", "kvpd_converting", CONVERT, 1, ["untagged-peer"]),
    ("kvpd", "stock", (), 2, ["pages-unknown"]),
    ("kvpd_converting", "stock", (), 1, ["stock-digest", "stock-layout", "stock-regions"]),
]
MORE_PAIRS = [
    ("kvpd_other_name", "kvpd", (), 0, []),
    ("stock_other_name", "kvpd", (), 1, ["stock-digest"]),
    # The table of what stock does with two formats. It accepts, and tokens are wrong.
    ("stock", "stock_shuffled", (), 2, ["pages-unknown"]),
    ("stock_shuffled", "stock", (), 2, ["pages-unknown"]),
    ("stock_lhbnc", "stock_shuffled_lhbnc", (), 2, ["pages-unknown"]),
    ("stock", "stock_shuffled_lhbnc", (), 1, ["stock-layout", "stock-regions"]),
    ("stock_wide_lhbnc", "stock_wide_shuffled_lhbnc", (), 1, ["stock-regions"]),
    ("stock_other_name", "stock", (), 1, ["stock-digest"]),
    # The layout alone is refused too: the decoder takes the prefill for what stock takes it for.
    ("stock_lhbnc", "kvpd", (), 1, ["stock-layout", "stock-regions"]),
    ("stock_wide", "stock", (), 1, ["stock-digest"]),
]


@pytest.mark.parametrize(
    ("source", "target", "options", "status", "codes"),
    [
        *(pytest.param(*pair, marks=pytest.mark.core) for pair in PAIRS),
        *(pytest.param(*pair, marks=pytest.mark.slow) for pair in MORE_PAIRS),
    ],
)
def test_check_says_what_the_handshake_then_does(
    source: str,
    target: str,
    options: tuple[str, ...],
    status: int,
    codes: list[str],
    engines: Engines,
    colocated: Colocated,
    capsys: pytest.CaptureFixture[str],
) -> None:
    exit_status, value = printed(
        capsys, "check", engines.address(source), engines.address(target), *options
    )
    assert exit_status == status
    listed = value["reasons"] if status == 1 else value["doubts"] + value["unproved"]
    assert [finding["code"] for finding in listed] == codes

    batch = prompts(1, blocks=3, block_size=BLOCK, seed=11)
    requests = prefill(engines[source], batch)
    result = decode(engines[target], requests, engines.directory)
    finished = set(result.finish_reasons.values())
    assert value["handshake"] == ("accepted" if finished == {"length"} else "refused")
    assert finished in ({"length"}, {"error"})
    if status == 0:
        # It works: the tokens are those of an engine that needed no hand-over.
        assert list(result.tokens.values()) == colocated(SHAPE, BLOCK, batch)


def test_the_cost_of_real_engines_is_counted_from_their_model(
    engines: Engines, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bytes and descriptors that `check` predicts, by the model's layers and page size."""
    pair = engines.address("kvpd"), engines.address("kvpd_converting")
    _, value = printed(capsys, "check", *pair, *CONVERT)
    cost = value["cost"]
    assert cost["bytes_per_1k_tokens"] == 1000 * LAYERS * PAGE_BYTES // BLOCK
    in_place, staged = cost["placements"]
    # Half a page per descriptor in the cache, whole pages in a slab.
    assert in_place["num_descriptors"] == 2 * LAYERS * cost["num_pages"]
    assert staged["num_descriptors"] == LAYERS * cost["num_pages"]


def test_saved_files_are_as_good_as_the_engines(
    engines: Engines, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("kvpd", "kvpd_converting")
    paths = [str(tmp_path / f"{name}.json") for name in names]
    for name, path in zip(names, paths, strict=True):
        assert main(["inspect", engines.address(name), "--save", path]) == 0
    capsys.readouterr()
    online = printed(capsys, "check", *map(engines.address, names), *CONVERT)
    offline = printed(capsys, "check", *paths, *CONVERT)
    assert offline == online
