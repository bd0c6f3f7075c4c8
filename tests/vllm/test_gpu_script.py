"""The script that compares arms on GPUs (tests/gpu/serve.py), with its tiny model on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.gpu import report, serve


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
