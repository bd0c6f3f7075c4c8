"""``kvpd demo --vllm`` says what is so, and its status is what it says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from tests.vllm import demo
from tests.vllm.client import ROOT

pytestmark = pytest.mark.core


def test_the_demo_holds_and_shows_both_sides() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvpd.cli", "demo", "--vllm"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for text in (
        "kvpd's verdict: convert: ",
        "vLLM's connector warned of: nothing",
        "0 of 4",  # stock's right answers
        "4 of 4",  # ours
        "84 of 84",  # 4 prompts of 7 blocks, 3 layers
        "every token and every byte is right",
    ):
        assert text in done.stdout, done.stdout


@pytest.mark.parametrize(
    ("tokens", "right_pages", "status"),
    [([[1]] * 4, 84, 0), ([[1], [1], [1], [2]], 84, 1), ([[1]] * 4, 83, 1), ([], 0, 1)],
)
def test_the_status_is_zero_only_if_all_is_right(
    tokens: list[list[int]],
    right_pages: int,
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """What the engines return is given; that they run is the test above."""
    names = [
        f"vllm:kvpd_{what}_seconds_{kind}"
        for what in ("read", "convert")
        for kind in ("sum", "count")
    ]
    metrics = dict.fromkeys(names, 1.0)
    ours = demo.Arm(tokens or [[]] * 4, right_pages, "convert: so", metrics)
    stock = demo.Arm([[9]] * 4, 0, "nothing", metrics)
    monkeypatch.setattr(demo, "zygote", lambda _: None)
    monkeypatch.setattr(demo, "_alone", lambda *_: [[1]] * 4)
    monkeypatch.setattr(demo, "_stock", lambda *_: stock)
    monkeypatch.setattr(demo, "_kvpd", lambda *_: ours)
    assert demo.show(Console(quiet=True), tmp_path) == status
