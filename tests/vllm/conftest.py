"""Fixtures of the vLLM tests: real vLLM, real NIXL, one OS process per engine, CPU only.

They need vLLM and NIXL in the interpreter named by KVPD_VLLM_PYTHON (default: the one that runs
pytest); tests/vllm/requirements.txt lists what to install there. Without it they are skipped, and
the summary says so. KVPD_REQUIRE_VLLM=1 turns the skip into an error.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.checks import Colocated
from tests.vllm.client import ROOT, EngineOptions, EngineProcess, vllm_python
from tests.vllm.model import ModelShape, build_model
from tests.vllm.pair import DECODE_TOKENS

HERE = Path(__file__).parent
NEED_NO_VLLM = tuple(
    f"test_{name}.py"
    for name in (
        *("asker", "docs", "fingerprint", "held_records", "judgement", "link", "lost"),
        *("pairing", "readers", "reference", "slab_size", "units"),
    )
)
PROBE = "import nixl._api, vllm, vllm.entrypoints.llm; print(vllm.__version__)"


@cache
def missing_reason() -> str:
    """Why the engines cannot run here; "" if they can."""
    probe = subprocess.run(
        [vllm_python(), "-c", PROBE], capture_output=True, text=True, check=False, cwd=ROOT
    )
    if probe.returncode == 0:
        return ""
    last = probe.stderr.strip().splitlines()[-1:] or ["no output"]
    return f"{vllm_python()} cannot run vLLM with NIXL: {last[0]}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE) and item.path.name not in NEED_NO_VLLM:
            item.add_marker("vllm")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("vllm") is None or not item.path.is_relative_to(HERE):
        return
    reason = missing_reason()
    if reason and os.environ.get("KVPD_REQUIRE_VLLM") == "1":
        pytest.fail(reason, pytrace=False)
    if reason:
        pytest.skip(reason)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = [
        report
        for report in terminalreporter.getreports("skipped")
        if str(report.nodeid).startswith("tests/vllm/")
    ]
    if skipped:
        terminalreporter.write_sep("!", "vLLM tests did not run", red=True, bold=True)
        terminalreporter.write_line(f"{len(skipped)} skipped: {missing_reason()}")


@pytest.fixture(scope="session")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[ModelShape], Path]:
    directory = tmp_path_factory.mktemp("models")
    return lambda shape: build_model(directory, shape)


@pytest.fixture(scope="session")
def colocated(
    model_of: Callable[[ModelShape], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Colocated]:
    """Tokens of one engine that prefills and decodes by itself, on the shuffled backend.

    The reference of every hand-over: it involves no connector at all.
    """
    engines: dict[tuple[ModelShape, int], EngineProcess] = {}
    serial = iter(range(10**9))

    def tokens(
        shape: ModelShape,
        block_size: int,
        batch: Sequence[Sequence[int]],
        max_tokens: int = DECODE_TOKENS,
    ) -> list[list[int]]:
        key = (shape, block_size)
        if key not in engines:
            for engine in engines.values():
                engine.close()
            engines.clear()
            options = EngineOptions(
                model_of(shape), "shuffled", dtype=shape.dtype, block_size=block_size
            )
            engines[key] = EngineProcess("colocated", options, tmp_path_factory.mktemp("colocated"))
            facts = engines[key].facts
            assert facts["implementations"] == ["ShuffledAttention"], facts
            assert facts["connector"] is None
        requests: list[dict[str, Any]] = [
            {"id": f"colocated-{next(serial)}", "prompt": list(p), "max_tokens": max_tokens}
            for p in batch
        ]
        done = engines[key].run(requests)
        return [done[request["id"]]["tokens"] for request in requests]

    yield tokens
    for engine in engines.values():
        engine.close()
