"""The report of a machine without an AMD GPU: it says what was not run, and why."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.amd.accuracy import PROMPTS, _judged
from tests.amd.parts import DIRECT, NO_DIRECT, byte_checks, direct_checks
from tests.vllm.client import ROOT, vllm_python

PARTS = ["byte checks", DIRECT, "conversion bench", "accuracy of 1P1D"]


def report(tmp_path: Path, python: str, *options: str) -> tuple[int, dict[str, Any], str]:
    out = tmp_path / "report.json"
    done = subprocess.run(
        [python, "-m", "tests.amd", "--out", str(out), *options],
        cwd=ROOT,
        # No GPU here, whatever the machine has.
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert out.is_file(), done.stderr
    return done.returncode, json.loads(out.read_text()), done.stdout


def test_without_a_gpu_every_part_says_why_it_was_not_run(tmp_path: Path) -> None:
    status, found, said = report(tmp_path, sys.executable)
    assert status == 2
    assert [part["name"] for part in found["parts"]] == PARTS
    for part in found["parts"]:
        assert (part["status"], part["why"]) == ("not run", "torch sees no GPU")
    assert said.count("not run: torch sees no GPU") == len(PARTS)
    machine = found["machine"]
    assert machine["packages"]["torch"] and machine["packages"]["kvpd"]
    assert machine["devices"] == [] and machine["python"] and len(machine["kvpd_commit"]) == 40


def test_checks_of_which_none_ran_have_not_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a GPU claimed where there is none, pytest runs and skips everything."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    part = byte_checks({"why_no_gpu": ""})
    assert part.status == "not run"
    assert part.as_json()["counts"] == ["1 skipped"]


def test_direct_placement_is_run_on_cuda_only(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = {"devices": [{"name": "a GPU"}], "why_no_gpu": ""}
    part = direct_checks({**gpu, "hip": "7.2", "cuda": None})
    assert (part.status, part.why, part.details) == ("not run", NO_DIRECT, {})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = direct_checks({**gpu, "hip": None, "cuda": "13.0"}).as_json()
    assert found["command"][-1] == "tests/gpu/check_direct.py"
    assert (found["status"], found["counts"]) == ("not run", ["1 skipped"])


@pytest.mark.parametrize(
    ("got", "converted", "status"),
    [
        ([[1]] * PROMPTS, 13 * PROMPTS, "passed"),
        ([[1]] * (PROMPTS - 1) + [[2]], 13 * PROMPTS, "failed"),
        # Right tokens of a decoder that converted nothing show nothing.
        ([[1]] * PROMPTS, 0, "failed"),
    ],
)
def test_when_the_accuracy_run_passes(got: list[list[int]], converted: int, status: str) -> None:
    metrics = {"vllm:kvpd_pages_converted_total": float(converted)}
    part = _judged([[1]] * PROMPTS, got, {"metrics": metrics})
    assert part.status == status
    assert bool(part.why) == (status == "failed")


@pytest.mark.slow
@pytest.mark.vllm
def test_the_accuracy_run_on_the_cpu_bed(tmp_path: Path) -> None:
    """The same three servers and the same comparison, with test backends in place of AITER."""
    status, found, _ = report(tmp_path, vllm_python(), "--cpu-bed")
    assert status == 2
    part = found["parts"][-1]
    assert part["status"] == "passed", part
    assert part["equal_answers"] == f"{PROMPTS} of {PROMPTS}"
    assert "CPU test backends" in part["stands_in"]
    assert set(part["commands"]) == {"reference", "prefill", "decode"}
    assert part["metrics"]["vllm:kvpd_pages_converted_total"] == 13 * PROMPTS
