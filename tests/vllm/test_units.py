"""Parts of the connector that need no vLLM: declared formats, keys, versions, leases."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from kvpd import FormatError, KvpdError, LinkModel, PageFormat, negotiate
from kvpd.vllm.config import ConnectorConfig
from kvpd.vllm.formats import (
    AITER_FA,
    AITER_UNIFIED,
    PACKED,
    LayerCache,
    opaque,
    page_format,
    spans_of,
    why_opaque,
)
from kvpd.vllm.leases import MARGIN_SECONDS, Leases
from kvpd.vllm.versions import check_nixl, check_vllm, public_release
from tests.vllm.checks import warnings_about_pages
from tests.vllm.model import ModelShape, ModelSize, build_model

TRITON = "vllm.v1.attention.backends.triton_attn.TritonAttentionBackend"
ROCM_ATTN = "vllm.v1.attention.backends.rocm_attn.RocmAttentionBackend"
PACKED_CACHE = LayerCache(
    backend=TRITON,
    kv_heads=8,
    tokens=16,
    head_dim=128,
    dtype="bfloat16",
    layout="LBHNC",
    page_bytes=65536,
    has_plain_content=True,
)
STANDARD = PageFormat.standard(heads=8, tokens=16, head_dim=128, dtype="bfloat16")
SHUFFLED = PageFormat.aiter_shuffle(heads=8, tokens=16, head_dim=128, dtype="bfloat16")


class Plain:
    """A backend that declares nothing."""


@pytest.mark.parametrize("backend", sorted(PACKED))
def test_packed_backends_are_standard(backend: str) -> None:
    assert page_format(replace(PACKED_CACHE, backend=backend), Plain) == STANDARD


def test_the_layout_decides_the_interior() -> None:
    token_major = PageFormat.standard(
        heads=8, tokens=16, head_dim=128, dtype="bfloat16", interior="NHC"
    )
    assert page_format(replace(PACKED_CACHE, layout="LBNHC"), Plain) == token_major
    assert token_major != STANDARD


def test_aiter_is_shuffled_only_with_its_switch() -> None:
    cache = replace(PACKED_CACHE, backend=AITER_FA)
    assert page_format(cache, Plain) == STANDARD
    shuffled = replace(cache, is_shuffled=True, num_head_slots=2)
    assert page_format(shuffled, Plain) == SHUFFLED


@pytest.mark.parametrize(
    "change",
    [
        {"backend": ROCM_ATTN, "num_head_slots": 2},
        {"backend": "somebody.else.Backend"},
        {"num_head_slots": 2},
        {"has_plain_content": False},
        {"backend": AITER_FA, "is_shuffled": True},
        # Slots interleaved token by token: no dense planes.
        {"backend": AITER_FA, "is_shuffled": True, "num_head_slots": 2, "layout": "LBNHC"},
    ],
)
def test_anything_else_is_opaque_and_equals_only_itself(change: dict[str, Any]) -> None:
    """Two head slots alone do not make a page shuffled, nor does a shape make one standard."""
    cache = replace(PACKED_CACHE, **change)
    format = page_format(cache, Plain)
    assert format == opaque(cache)
    assert format.page_bytes == cache.page_bytes
    assert negotiate(format, format).kind == "identical"
    assert negotiate(format, opaque(replace(cache, identity="other"))).kind == "refuse"
    for known in (STANDARD, SHUFFLED):
        assert negotiate(format, known, convert=True).kind == "refuse"
        assert negotiate(known, format, convert=True).kind == "refuse"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, ""),
        ({"backend": "somebody.else.Backend"}, "backend"),
        ({"num_head_slots": 2}, "slots"),
        ({"has_plain_content": False}, "content"),
        ({"backend": AITER_FA, "is_shuffled": True, "num_head_slots": 2}, ""),
        (
            {"backend": AITER_FA, "is_shuffled": True, "num_head_slots": 2, "layout": "LBNHC"},
            "layout",
        ),
        # On gfx1250 the unified backend shuffles, and publishes no slots.
        ({"backend": AITER_UNIFIED, "is_shuffled": True}, "slots"),
    ],
)
def test_why_a_page_is_opaque(change: dict[str, Any], reason: str) -> None:
    cache = replace(PACKED_CACHE, **change)
    assert why_opaque(cache, Plain) == reason
    assert (page_format(cache, Plain).family == "opaque") == bool(reason)


class HookThatDeclaresNone:
    @classmethod
    def kvpd_page_format(cls, **shape: Any) -> None:
        return None


def test_a_hook_may_declare_none() -> None:
    assert why_opaque(PACKED_CACHE, HookThatDeclaresNone) == "hook"
    assert page_format(PACKED_CACHE, HookThatDeclaresNone) == opaque(PACKED_CACHE)


def test_a_backend_declares_its_own_format() -> None:
    class Declaring:
        @classmethod
        def kvpd_page_format(cls, **shape: Any) -> PageFormat:
            assert shape == {
                "kv_heads": 8,
                "tokens": 16,
                "head_dim": 128,
                "dtype": "bfloat16",
                "layout": "LBHNC",
            }
            return SHUFFLED

    cache = replace(PACKED_CACHE, backend="somebody.else.Backend")
    assert page_format(cache, Declaring) == SHUFFLED
    with pytest.raises(FormatError) as caught:
        page_format(replace(cache, page_bytes=32768), Declaring)
    assert (caught.value.code, caught.value.got, caught.value.expected) == (
        "declared-page-bytes",
        "65536",
        "32768",
    )


def test_spans_cut_a_page_into_head_slots() -> None:
    def flat(format: PageFormat, num_regions: int) -> list[list[tuple[int, int, int]]]:
        return [
            [(s.plane, s.start_bytes, s.num_bytes) for s in spans_of(format, num_regions, i)]
            for i in range(num_regions)
        ]

    assert flat(STANDARD, 1) == [[(0, 0, 65536)]]
    assert flat(STANDARD, 8) == [[(0, 8192 * head, 8192)] for head in range(8)]
    assert flat(SHUFFLED, 1) == [[(0, 0, 32768), (1, 0, 32768)]]
    assert flat(SHUFFLED, 2) == [[(0, 0, 32768)], [(1, 0, 32768)]]
    with pytest.raises(FormatError) as caught:
        spans_of(STANDARD, 3, 0)
    assert caught.value.code == "regions-per-page"


def test_keys_have_defaults_and_exact_types() -> None:
    assert ConnectorConfig.of({"backends": ["UCX"]}) == ConnectorConfig(False, False, None)
    assert ConnectorConfig.of({"slab_bytes": 0}) == ConnectorConfig(False, False, 0)
    assert ConnectorConfig.of({"page_format_conversion": True, "slab_bytes": 1 << 30}) == (
        ConnectorConfig(True, False, 1 << 30)
    )
    for key, value in (
        ("page_format_conversion", "false"),
        ("require_tagged_peers", 1),
        ("held_timeout_seconds", 0),
        ("held_timeout_seconds", 61),
        ("held_timeout_seconds", "2"),
        ("held_timeout_seconds", True),
        ("held_timeout_seconds", float("nan")),
        ("slab_bytes", True),
        ("slab_bytes", None),
        ("slab_bytes", -1),
        ("slab_bytes", "1GiB"),
        ("direct_transfer", 1),
        ("allow_other_weights", "yes"),
        ("link", "fast"),
        ("link", {"bytes_per_second": True}),
    ):
        with pytest.raises(KvpdError) as caught:
            ConnectorConfig.of({key: value})
        assert caught.value.code == "invalid-config"
        assert caught.value.field == f"kv_connector_extra_config.{key}"
        assert caught.value.got == repr(value)


def test_a_misspelt_key_is_refused_and_one_of_vllms_is_not() -> None:
    for key, meant in (
        ("require_tagged", "require_tagged_peers"),
        ("slab_byte", "slab_bytes"),
        ("page_format_conversions", "page_format_conversion"),
        ("direct_transfers", "direct_transfer"),
        ("allow_other_weight", "allow_other_weights"),
    ):
        with pytest.raises(KvpdError) as caught:
            ConnectorConfig.of({key: True})
        assert (caught.value.code, caught.value.expected) == ("invalid-config", repr(meant))
    theirs = (
        *("backends", "num_threads", "kv_lease_duration", "enforce_handshake_compat"),
        *("enable_permute_local_kv", "backend_params", "kv_recompute_threshold", "prefetch"),
    )
    assert ConnectorConfig.of(dict.fromkeys(theirs, 1)) == ConnectorConfig()


def test_rates_are_the_link_models() -> None:
    config = ConnectorConfig.of({"link": {"bytes_per_second": 5e9}})
    assert config.link_model("dram") == LinkModel("dram", bytes_per_second=5e9)
    assert ConnectorConfig.of({}).link_model("vram") == LinkModel("vram")
    for rates in ({"bytes_per_second": 0}, {"speed": 1.0}):
        with pytest.raises(KvpdError) as caught:
            ConnectorConfig.of({"link": rates})
        assert caught.value.field == "kv_connector_extra_config.link"


def test_unknown_releases_are_named() -> None:
    for version in ("0.30.0", "0.31.2", "0.32.0+cpu", "0.33.0+rocm721"):
        check_vllm(version)
    for version in ("0.29.1", "0.34.0", "1.0.0", "dev"):
        with pytest.raises(KvpdError) as caught:
            check_vllm(version)
        assert (caught.value.code, caught.value.got) == ("unsupported-version", version)
        assert "0.32.x" in str(caught.value)
    assert public_release("0.33.0+rocm721") == public_release("0.33.0+cu129") == "0.33.0"


@pytest.mark.parametrize(
    ("installed", "unknown"),
    [
        ({"nixl": "1.5.1"}, None),
        ({"nixl-rocm": "1.5.0+rocm7"}, None),
        ({}, "none"),
        ({"nixl": "1.6.0"}, "1.6.0"),
        ({"nixl": "1.4.2"}, "1.4.2"),
        # vLLM loads one of them, and which one is its affair.
        ({"nixl": "1.5.1", "nixl-cu12": "1.4.2"}, "1.4.2"),
    ],
)
def test_an_unknown_nixl_is_refused(
    installed: dict[str, str], unknown: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(metadata, "version", version)
    if unknown is None:
        check_nixl()
        return
    with pytest.raises(KvpdError) as caught:
        check_nixl()
    assert (caught.value.code, caught.value.field) == ("unsupported-version", "nixl")
    assert (caught.value.got, caught.value.expected) == (unknown, "1.5.x")
    assert f"does not know NIXL {unknown}; it works with 1.5.x" in str(caught.value)


def test_which_lines_warn_about_pages() -> None:
    """Without a match for each, "stock says nothing" could not fail."""
    start = "(MainProcess pid=643) {} 11-30 07:46:10 [base_worker.py:614] "
    texts = ("NIXL transfer failure", "kv_cache_layout differs", "the Connector gave up", "KV head")
    lines = [start.format(level) + text for level in ("WARNING", "ERROR") for text in texts]
    others = [start.format("INFO") + text for text in texts]
    others.append(start.format("WARNING") + "Passing raw prompts is deprecated")
    assert warnings_about_pages("\n".join([*lines, *others])) == lines


def test_models_of_two_sizes_in_one_folder(tmp_path: Path) -> None:
    shape, small = ModelShape(kv_heads=1), ModelSize(layers=1, hidden=64)
    paths = [build_model(tmp_path, shape, size) for size in (small, replace(small, layers=2))]
    found = [json.loads((path / "config.json").read_text()) for path in paths]
    assert [config["num_hidden_layers"] for config in found] == [1, 2]
    assert build_model(tmp_path, shape, small) == paths[0]


def test_leases() -> None:
    leases = Leases(extension_seconds=20)
    assert leases.deadline("r", None) is None
    assert leases.deadline("r", 100.0) == 100 - MARGIN_SECONDS
    leases.renew(["r"], now=95.0)
    assert leases.deadline("r", 100.0) == 115 - MARGIN_SECONDS
    assert leases.deadline("other", 100.0) == 100 - MARGIN_SECONDS
    leases.renew(["r"], now=110.0)
    assert leases.deadline("r", 100.0) == 130 - MARGIN_SECONDS
    # A renewal never shortens.
    assert leases.deadline("r", 200.0) == 200 - MARGIN_SECONDS


def test_a_lease_that_ran_out_is_not_revived() -> None:
    leases = Leases(extension_seconds=20)
    leases.renew(["r"], now=99.0)
    assert leases.deadline("r", 100.0) == 100 - MARGIN_SECONDS
    leases.renew(["r"], now=97.0 + 20)
    assert leases.deadline("r", 100.0) == 100 - MARGIN_SECONDS


def test_heartbeats_of_ended_requests_are_forgotten() -> None:
    leases = Leases(extension_seconds=20)
    leases.renew(["r"], now=50.0)
    leases.renew(["s"], now=70.0)
    assert leases.deadline("r", 60.0) == 60 - MARGIN_SECONDS
    assert leases.deadline("s", 80.0) == 90 - MARGIN_SECONDS
