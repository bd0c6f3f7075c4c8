"""Geometry with a release's own classes, without its compiled modules (geometry.py).

The release's Python is unpacked by `make target/vllm-0.33.0`, or named by KVPD_VLLM_GEOMETRY.
Descriptor rows and ids that kvpd plans for equal formats must be those that the release's worker
makes, and the regions must hold exactly the bytes that the cache's own views show.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.client import ROOT, vllm_python

RELEASE = "0.33.0"
KINDS = {"standard": "standard", "shuffled": "aiter-shuffle"}
pytestmark = pytest.mark.core
NUM_CASES = 2 * 6 * 4 + 2


@pytest.fixture(scope="module")
def findings() -> list[dict[str, Any]]:
    place = Path(os.environ.get("KVPD_VLLM_GEOMETRY", ROOT / "target" / f"vllm-{RELEASE}"))
    if not (place / "vllm").is_dir():
        if os.environ.get("KVPD_REQUIRE_VLLM") == "1":
            pytest.fail(f"no vLLM {RELEASE} in {place}", pytrace=False)
        pytest.skip(f"no vLLM {RELEASE} in {place}: make target/vllm-{RELEASE}")
    path = [str(place), os.environ.get("PYTHONPATH", ""), str(ROOT)]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "VLLM_TARGET_DEVICE": "cpu",
    }
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    done = subprocess.run(
        [vllm_python(), "-m", "tests.vllm.geometry"],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(found) == NUM_CASES
    assert {case["vllm"] for case in found} == {RELEASE}
    return found


def test_rows_and_ids_are_those_of_the_release(findings: list[dict[str, Any]]) -> None:
    for case in findings:
        assert case["our_rows"] == case["stock_rows"], case
        assert case["our_pairs"] == case["stock_pairs"], case
        assert case["our_pairs"]


def test_regions_hold_the_pages_that_the_cache_shows(findings: list[dict[str, Any]]) -> None:
    for case in findings:
        assert case["wrong_pages"] == 0, case


def test_which_layouts_are_tagged(findings: list[dict[str, Any]]) -> None:
    """Others are opaque: whole rows of all layers, or slots that are interleaved."""
    for case in findings:
        slots = 2 if case["backend"] == "shuffled" else case["heads"]
        layout = case["layout"]
        interleaved = layout == "LBNHC" and case["backend"] == "shuffled"
        whole_rows = layout in ("BLNHC", "BHLNC") and slots > 1
        expected = "opaque" if interleaved or whole_rows else KINDS[case["backend"]]
        assert case["format"] == expected, case
        regions = 1 / 3 if whole_rows else slots if layout == "LHBNC" else 1
        assert case["regions_a_layer"] == pytest.approx(regions), case
