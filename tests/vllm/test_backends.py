"""Every attention backend that vLLM 0.30 to 0.33 define: layout, page format, description.

The code of kvpd and of the releases runs in a subprocess for each release (backend_scan.py). Its
findings are one table, which is checked in and shown in docs/vllm.md.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from kvpd.vllm.formats import AITER_FA, AITER_UNIFIED, PACKED
from tests.vllm import backend_table
from tests.vllm.releases import RELEASES, missing, scanned

pytestmark = pytest.mark.core
ANY_LAYOUT = {"flash_attn.FlashAttentionBackend", "triton_attn.TritonAttentionBackend"}
# Every module below a release's vllm/ that asks whether AITER's shuffle switch is on.
SWITCHED = {
    "_aiter_ops.py",
    "models/minimax_m3/common/sparse_attention.py",
    "v1/attention/backends/rocm_aiter_fa.py",
}


@pytest.fixture(scope="module")
def findings() -> dict[str, tuple[dict[str, Any], ...]]:
    absent = [reason for release in RELEASES if (reason := missing(release))]
    if absent:
        if os.environ.get("KVPD_REQUIRE_VLLM") == "1":
            pytest.fail(absent[0], pytrace=False)
        pytest.skip(absent[0])
    return {release: scanned(release) for release in RELEASES}


def of_kind(
    findings: dict[str, tuple[dict[str, Any], ...]], kind: str
) -> list[tuple[str, dict[str, Any]]]:
    return [(r, f) for r, found in findings.items() for f in found if f["kind"] == kind]


def test_the_table_is_what_a_scan_finds(findings: dict[str, tuple[dict[str, Any], ...]]) -> None:
    table = backend_table.table_of(findings)
    assert json.loads(backend_table.DATA.read_text()) == table, "python -m tests.vllm.backend_table"
    text = backend_table.DOC.read_text()
    assert backend_table.document(table, text) == text, "python -m tests.vllm.backend_table"


def test_every_class_was_asked(findings: dict[str, tuple[dict[str, Any], ...]]) -> None:
    for release, found in findings.items():
        (head,) = (f for f in found if f["kind"] == "release")
        assert head["vllm"].partition("+")[0] == release
        asked = {f["class"] for f in found if f["kind"] in ("class", "missing")}
        assert asked == set(head["classes"])
        assert len(asked) > 80
        assert set(PACKED) <= asked


def test_backends_that_take_any_layout_start(
    findings: dict[str, tuple[dict[str, Any], ...]],
) -> None:
    """kvpd keeps stock's preference; a backend that states no layouts says None."""
    for release in RELEASES:
        plain = {
            f["class"].rpartition("backends.")[2]: f
            for r, f in of_kind(findings, "class")
            if r == release and f["variant"] == "" and f["layouts"] is None
        }
        assert {*ANY_LAYOUT, "flashinfer.FlashInferBackend"} <= set(plain)
        for name in (*ANY_LAYOUT, "flashinfer.FlashInferBackend"):
            assert plain[name]["asks_for"] == ["None"]


def test_only_shuffled_pages_get_a_layout_of_their_own(
    findings: dict[str, tuple[dict[str, Any], ...]],
) -> None:
    shuffled = set()
    for release, finding in of_kind(findings, "class"):
        if finding["asks_for"] not in ([], ["None"]):
            assert finding["asks_for"] == ["LHBNC"]
            shuffled.add((release, finding["class"], finding["variant"]))
    assert shuffled == {(release, AITER_FA, "shuffle switch on") for release in RELEASES}


def test_packed_backends_write_what_the_format_says(
    findings: dict[str, tuple[dict[str, Any], ...]],
) -> None:
    """Each class's own update, in each layout that it takes, as built and with the switch on."""
    proved = set()
    for release, finding in of_kind(findings, "written"):
        assert finding["calls"] > 0, finding
        assert finding["wrong_pages"] == 0, finding
        # The map of the format, from offsets alone.
        assert finding["is_oracle_format"], finding
        if finding["family"] in backend_table.KNOWN:
            assert finding["pages"] > 0, finding
            proved.add((release, finding["class"], finding["variant"], finding["layout"]))
        else:
            assert finding["layout"] in ("BLNHC", "BHLNC") or finding["class"] == AITER_UNIFIED
    as_built = {(release, path) for release, path, variant, _ in proved if not variant}
    assert as_built == {(release, path) for release in RELEASES for path in PACKED}
    for release in RELEASES:
        assert (release, AITER_FA, "shuffle switch on", "LHBNC") in proved
        # The switch alone does not move the unified backend's pages.
        assert (release, AITER_UNIFIED, "shuffle switch on", "LBHNC") in proved


def test_a_switch_that_moves_pages_is_known(
    findings: dict[str, tuple[dict[str, Any], ...]],
) -> None:
    """`_is_shuffled` names who heeds AITER's switch: nobody else may, in any release."""
    for release, found in findings.items():
        (head,) = (f for f in found if f["kind"] == "release")
        root = Path(head["place"])
        users = {
            path.relative_to(root).as_posix()
            for path in root.rglob("*.py")
            if re.search(r"\bis_shuffle_kv_cache_enabled\(", path.read_text())
        }
        unified = {"v1/attention/backends/rocm_aiter_unified_attn.py"}
        assert users - unified == SWITCHED, release


def test_who_heeds_the_switch(findings: dict[str, tuple[dict[str, Any], ...]]) -> None:
    """Their names alone do not tell a stock peer how their pages look (`stock_knows_pages`)."""
    for release, finding in of_kind(findings, "class"):
        path, variant = finding["class"], finding["variant"]
        heeds = path == AITER_FA or path.startswith("vllm.models.minimax_m3.")
        is_on = variant.startswith("shuffle switch on")
        is_unified = path == AITER_UNIFIED and variant.endswith("gfx1250")
        assert finding["shuffled"] == (is_on and (heeds or is_unified)), (release, path, variant)


def test_hardware_is_part_of_quantised_pages_on_every_platform(
    findings: dict[str, tuple[dict[str, Any], ...]],
) -> None:
    floats = {
        "cuda.CudaPlatformBase": "torch.float8_e4m3fn",
        "rocm.RocmPlatform": "torch.float8_e4m3fnuz",  # gfx942
        "xpu.XPUPlatform": "torch.float8_e4m3fn",
    }
    found = of_kind(findings, "platform")
    assert len(found) == len(floats) * len(RELEASES)
    for release, finding in found:
        quantised, plain = finding["factors"]
        assert plain == []
        assert quantised[1] == floats[finding["platform"]], (release, finding)


def test_quantised_pages_of_known_backends_are_opaque(
    findings: dict[str, tuple[dict[str, Any], ...]],
) -> None:
    for _, finding in of_kind(findings, "class"):
        if finding["class"] not in PACKED:
            outcomes = {o for found in finding["pages"].values() for o in found}
            assert not outcomes & set(backend_table.KNOWN), finding["class"]
            continue
        for dtype, outcomes in finding["pages"].items():
            if not dtype.startswith(("auto", "float16", "bfloat16", "float32")):
                assert not set(outcomes) & set(backend_table.KNOWN), (finding["class"], dtype)
