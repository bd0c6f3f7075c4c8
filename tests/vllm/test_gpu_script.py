"""The scripts that run engines on GPUs (tests/gpu: serve, smoke), with a tiny model on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.gpu import report, serve, smoke
from tests.gpu.arms import KVPD, SMOKE_ARMS
from tests.gpu.bed import TINY, Bed
from tests.gpu.measure import compared_prompts, tokens_alone, tokens_from_pages_of
from tests.vllm.client import EngineProcess
from tests.vllm.model import build_model


@pytest.mark.slow
def test_arms_are_checked_timed_and_reported(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    names = ["kvpd, slab", "stock, standard to shuffled"]
    assert serve.main(["--gpus", "0", "--json", str(path), "--arms", *names]) == 0
    result = json.loads(path.read_text())
    assert list(result["arms"]) == names
    assert result["shuffled_equals_standard"]
    (slab, stock) = result["arms"].values()
    assert len(slab["measured"]) == 2
    for row in slab["measured"][0]["hand_overs"]:
        assert row["ready"]["placement"] == "staged"
        assert row["thread_seconds"] == row["start_seconds"] + row["poll_seconds"]
        # The request is posted in the one and reported by the other.
        assert row["start_seconds"] >= row["ready"]["post_seconds"] > 0
        assert row["num_polls"] >= 1
        assert row["poll_seconds"] > 0
        assert row["thread_seconds"] < row["hand_over_seconds"]
    assert not any(answer["right_tokens"] for answer in stock["checked"]["one_by_one"])
    assert "| kvpd, slab | 4 of 4 |" in report.text(result)


@pytest.mark.slow
def test_the_smoke_joins_engines_and_reports(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    arguments = ["--gpus", "0", "--json", str(path), "--logs", str(tmp_path / "logs")]
    assert smoke.main(arguments) == 0
    parts = json.loads(path.read_text())["parts"]
    assert {name: part["status"] for name, part in parts.items()} == {
        **dict.fromkeys(("direct", "kernels", "receive"), "not run"),
        **dict.fromkeys(("pairs", "full"), "passed"),
    }
    assert list(parts["pairs"]["arms"]) == list(SMOKE_ARMS)
    for arm in parts["pairs"]["arms"].values():
        for answer in arm["checked"]["one_by_one"]:
            assert answer["right_tokens"] and answer["right_pages"] == answer["pages"] > 0
    assert len(list((tmp_path / "logs" / "pairs").glob("prefill-*.log"))) == 2
    assert len(list((tmp_path / "logs" / "pairs").glob("decode-*.log"))) == 5


@pytest.mark.slow
def test_tokens_follow_from_the_pages_of_another_engine(tmp_path: Path) -> None:
    """Pages that are not the prompt's own give other tokens, so the copy arrives."""
    bed = Bed(0, TINY, build_model(tmp_path, TINY.shape, TINY.model))
    batch = compared_prompts(TINY)[1:]
    with (
        EngineProcess("source", bed.prefill(KVPD), tmp_path) as source,
        EngineProcess("engine", bed.prefill(KVPD), tmp_path) as engine,
    ):
        alone = tokens_alone(engine, batch)
        assert tokens_from_pages_of(source, engine, batch, tmp_path) == alone
        # What the source has cached for these prompts is overwritten; it computes none of it again.
        source.call("poison", seed=3)
        mixed = tokens_from_pages_of(source, engine, batch, tmp_path)
        assert not np.any([a == b for a, b in zip(mixed, alone, strict=True)])
