"""Geometry with each release's own classes, without its compiled modules (geometry.py).

Descriptor rows and ids that kvpd plans for equal formats must be those that the release's worker
makes, and the regions must hold exactly the bytes that the cache's own views show.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests.vllm.releases import RELEASES, missing, scanned

KINDS = {"standard": "standard", "shuffled": "aiter-shuffle"}
pytestmark = pytest.mark.core
NUM_CASES = 2 * 6 * 4 + 2


@pytest.fixture(scope="module", params=RELEASES)
def findings(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    if reason := missing(request.param):
        if os.environ.get("KVPD_REQUIRE_VLLM") == "1":
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
    found = [finding for finding in scanned(request.param) if finding["kind"] == "geometry"]
    assert len(found) == NUM_CASES
    assert {case["vllm"].partition("+")[0] for case in found} == {request.param}
    return found


def a_row_each_block(rows: list[list[int]]) -> list[list[int]]:
    """Rows of [address, bytes, device, stride, count] as one row of three for each block."""
    return [
        [address + block * stride, num_bytes, device]
        for address, num_bytes, device, stride, count in rows
        for block in range(count)
    ]


def test_rows_and_ids_are_those_of_the_release(findings: list[dict[str, Any]]) -> None:
    for case in findings:
        ours = case["our_rows"]
        if len(case["stock_rows"][0]) == 3:
            # Before 0.33 each block has a row.
            ours = a_row_each_block(ours)
        assert ours == case["stock_rows"], case
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
