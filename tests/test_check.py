"""``kvpd check``: the answer is the decoder's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvpd.cli import main
from kvpd.cli.check.outcome import Assumed, outcome_of
from kvpd.cli.inspect.inspection import Inspection
from kvpd.errors import RefusedError
from kvpd.vllm.judgement import Digests, Local, Policy, judge
from kvpd.vllm.published import decode_payload
from tests.check_support import (
    CONVERT,
    OTHER_DIGEST,
    SHUFFLED,
    STANDARD,
    checked,
    codes,
    kvpd_engine,
    side,
    stock_engine,
)
from tests.engine_builder import engine
from tests.fake_side_channel import listening

P_KVPD = kvpd_engine(STANDARD, "P")
P_KVPD_SHUFFLED = kvpd_engine(SHUFFLED, "P", OTHER_DIGEST)
P_STOCK = stock_engine()
D_KVPD = kvpd_engine(STANDARD, "D")
D_KVPD_SHUFFLED = kvpd_engine(SHUFFLED, "D", OTHER_DIGEST)
D_STOCK = stock_engine(engine_id="D")
OTHER_LAYOUT: dict[str, Any] = {
    "kv_cache_layout": "LHBNC",
    "block_lens": [4096] * 12,
    "block_strides": [4096] * 12,
    "kv_caches_base_addr": list(range(12)),
    "region_names": [f"layer.{index}" for index in range(3) for _ in range(4)],
    "region_num_blocks": [11] * 12,
    "region_group_ids": [0] * 12,
    "region_mem_types": ["VRAM"] * 12,
}


@pytest.mark.parametrize(
    ("prefill", "decode", "options", "status", "handshake", "found"),
    [
        (P_KVPD, D_KVPD, (), 0, "accepted", []),
        (P_KVPD, D_KVPD_SHUFFLED, CONVERT, 0, "accepted", []),
        (P_KVPD, D_KVPD_SHUFFLED, (), 1, "refused", ["conversion-disabled"]),
        (kvpd_engine(STANDARD, "P", OTHER_DIGEST), D_KVPD, (), 0, "accepted", []),
        (P_KVPD, D_KVPD, ("--require-tagged-peers",), 0, "accepted", []),
        (
            P_KVPD_SHUFFLED,
            D_KVPD,
            (),
            1,
            "refused",
            ["conversion-disabled", "pair-out-of-scope"],
        ),
        (P_KVPD_SHUFFLED, D_KVPD, CONVERT, 1, "refused", ["pair-out-of-scope"]),
        # Of an untagged prefill the decoder knows what stock knows.
        (P_STOCK, D_KVPD, (), 2, "accepted", ["untagged-peer"]),
        (P_STOCK, D_KVPD, ("--require-tagged-peers",), 1, "refused", ["untagged-peer"]),
        (P_STOCK, D_KVPD_SHUFFLED, CONVERT, 1, "refused", ["untagged-peer"]),
        (stock_engine(OTHER_DIGEST), D_KVPD, (), 1, "refused", ["stock-digest"]),
        (
            stock_engine(OTHER_DIGEST),
            D_KVPD,
            ("--no-enforce-handshake-compat",),
            2,
            "accepted",
            ["untagged-peer"],
        ),
        # Accepted by kvpd's judgement and refused by the checks of stock that come after it.
        (stock_engine(**OTHER_LAYOUT), D_KVPD, (), 1, "refused", ["stock-layout", "stock-regions"]),
        (stock_engine(block_size=32), D_KVPD, (), 1, "refused", ["stock-block-size"]),
        (
            stock_engine(region_names=["a", "b", "c"]),
            D_KVPD,
            (),
            1,
            "refused",
            ["stock-region-names"],
        ),
        (
            stock_engine(block_lens=[8192] * 3),
            D_KVPD,
            (),
            2,
            "unknown",
            ["block-bytes", "untagged-peer"],
        ),
        (stock_engine(dcp_size=2), D_KVPD, (), 2, "unknown", ["context-parallel", "untagged-peer"]),
        # A stock decoder compares no pages.
        (P_STOCK, D_STOCK, (), 2, "accepted", ["pages-unknown"]),
        (P_KVPD, D_STOCK, (), 2, "accepted", ["pages-unknown"]),
        (stock_engine(OTHER_DIGEST), D_STOCK, (), 1, "refused", ["stock-digest"]),
        (
            P_KVPD_SHUFFLED,
            D_STOCK,
            (),
            1,
            "refused",
            ["stock-digest", "stock-layout", "stock-regions"],
        ),
        (
            stock_engine(OTHER_DIGEST),
            D_STOCK,
            ("--no-enforce-handshake-compat",),
            2,
            "accepted",
            ["pages-unknown"],
        ),
        # One region a layer and more blocks per block: what is converted are whole pages.
        (
            P_KVPD,
            kvpd_engine(SHUFFLED, "D", physical_blocks_per_logical_kv_block=2),
            CONVERT,
            1,
            "refused",
            ["blocks-not-whole"],
        ),
        (
            kvpd_engine(STANDARD, "P", block_lens=[4096] * 3),
            D_KVPD,
            (),
            1,
            "refused",
            ["tag-contradicts-metadata"],
        ),
        (kvpd_engine(STANDARD, "P", kvpd=b"\xc1"), D_KVPD, (), 1, "refused", ["malformed"]),
        (
            kvpd_engine(engine(tp_size=2, tp_rank=1, total_kv_heads=8, release="0.32.0"), "P"),
            D_KVPD,
            (),
            1,
            "refused",
            ["release", "total-kv-heads", "tp-size"],
        ),
    ],
)
def test_pairs(
    prefill: bytes,
    decode: bytes,
    options: tuple[str, ...],
    status: int,
    handshake: str,
    found: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    exit_status, value = checked(capsys, prefill, decode, *options)
    assert (exit_status, value["handshake"]) == (status, handshake)
    listed = value["reasons"] if status == 1 else value["doubts"] + value["unproved"]
    assert codes(listed) == found
    assert value["status"] == {0: "works", 1: "refused", 2: "unknown"}[status]
    for finding in listed:
        assert finding["field"]
        assert finding["remedy"]
        assert (
            finding["code"] in ("malformed",)
            or finding["decode"] != finding["prefill"]
            or (finding["code"] == "pages-unknown")
        )


def test_a_decoder_whose_tag_cannot_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    """What it would answer is not known; that is not a refusal."""
    broken = kvpd_engine(SHUFFLED, "D", kvpd=msgspec.msgpack.encode({"version": 9}))
    with listening({0: P_KVPD}) as prefill, listening({0: broken}) as decode:
        assert main(["check", prefill, decode]) == 2
    shown = capsys.readouterr()
    assert "the peer speaks kvpd wire version 9" in shown.err
    assert shown.out == ""


DESCRIPTIONS = [
    STANDARD,
    SHUFFLED,
    engine(layout="LHBNC"),
    engine("aiter_shuffle"),
    engine("split_kv", "LHBNC"),
    engine(tp_size=2, tp_rank=1),
    engine(model="other/model", cache_dtype="fp8"),
    engine(format_changes={"tokens": 32}, block_size=32),
    engine("aiter_shuffle", "LHBNC", uses_mla=True),
    engine(layers=("layer.0", "layer.2", "layer.1")),
]


@pytest.mark.parametrize("convert", [False, True])
def test_the_answer_is_the_decoders(convert: bool) -> None:
    """Every pair of these: refused with the reasons of the connector's own judgement, or served."""
    for local in DESCRIPTIONS:
        for remote in DESCRIPTIONS:
            prefill, decode = kvpd_engine(remote, "P"), side(kvpd_engine(local, "D"))
            outcome = outcome_of(side(prefill), decode, Assumed(page_format_conversion=convert))
            metadata = decode_payload(prefill).metadata
            try:
                judgement = judge(
                    Local(local), metadata, Digests("a", "b"), Policy(convert=convert)
                )
            except RefusedError as error:
                assert outcome.handshake == "refused"
                expected = [(r.code, r.local, r.remote) for r in error.verdict.reasons]
                assert [(f.code, f.decode, f.prefill) for f in outcome.reasons] == expected
            else:
                assert outcome.status == "works"
                assert outcome.verdict == judgement.verdict


def test_a_stock_decoder_and_a_tag_that_cannot_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    """The decoder skips the tag; what is said of the pages is that they are not known."""
    status, value = checked(capsys, kvpd_engine(STANDARD, "P", kvpd=b"\xc1"), D_STOCK)
    assert (status, value["handshake"]) == (2, "accepted")
    assert value["unproved"][0]["prefill"] == "a tag that cannot be read"


def test_what_if_conversion_were_enabled(capsys: pytest.CaptureFixture[str]) -> None:
    _, value = checked(capsys, P_KVPD, D_KVPD_SHUFFLED)
    assert value["would_convert"] is True
    _, value = checked(capsys, P_KVPD_SHUFFLED, D_KVPD)
    assert value["would_convert"] is False
    status, value = checked(capsys, P_KVPD, D_KVPD_SHUFFLED, *CONVERT)
    assert (status, value["verdict"]) == (0, "convert")
    assert value["conversion"] == {
        "source": "standard(H=4, N=16, D=64, bfloat16, HNC)",
        "target": "aiter-shuffle(H=4, N=16, D=64, bfloat16, v=tiled)",
    }


def test_text_has_every_reason_with_values_and_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    with listening({0: P_KVPD_SHUFFLED}) as prefill, listening({0: D_KVPD}) as decode:
        assert main(["check", prefill, decode]) == 1
    shown = capsys.readouterr().out
    for expected in (
        "refused: the decoder refuses this prefill",
        "conversion-disabled: page_format",
        "pair-out-of-scope: page_format",
        "decode   standard(H=4, N=16, D=64, bfloat16, HNC)",
        "prefill  aiter-shuffle(H=4, N=16, D=64, bfloat16, v=tiled)",
        "keep standard HNC pages on the side that owns the pages and AITER shuffled ones on the",
        "page_format_conversion off",
    ):
        assert expected in shown


def test_a_value_that_is_wrong_on_both_sides_is_printed_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    staged = engine(pp_size=2)
    blobs = kvpd_engine(staged, "p"), kvpd_engine(staged, "d")
    status, value = checked(capsys, blobs[0], blobs[1])
    (reason,) = value["reasons"]
    assert (status, reason["code"], reason["is_shared"]) == (1, "pp-size", True)
    with listening({0: blobs[0]}) as prefill, listening({0: blobs[1]}) as decode:
        assert main(["check", prefill, decode]) == 1
    shown = capsys.readouterr().out
    _, _, reason_shown = shown.partition("pp-size: pp_size")
    assert "both  2" in reason_shown and "prefill" not in reason_shown


def test_weights_that_differ_or_are_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    unknown = kvpd_engine(engine(model_weights=None), "unknown")
    other = kvpd_engine(engine(model_weights="weights 2"), "other")
    allow = ("--allow-other-weights",)
    for prefill, options, status, unproved in (
        (other, (), 1, []),
        (other, allow, 2, ["model-weights"]),
        (unknown, (), 2, ["model-unproved"]),
        (unknown, allow, 2, ["model-unproved"]),
    ):
        found, value = checked(capsys, prefill, D_KVPD, *options)
        assert (found, codes(value["unproved"])) == (status, unproved)
        assert value["handshake"] == ("refused" if status == 1 else "accepted")


def test_files_give_the_answer_of_the_engines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = []
    for name, blob in (("p", P_KVPD), ("d", D_KVPD_SHUFFLED)):
        inspection = Inspection.of(decode_payload(blob), f"{name}:1", 0)
        paths.append(tmp_path / f"{name}.json")
        paths[-1].write_bytes(inspection.to_json())
    _, online = checked(capsys, P_KVPD, D_KVPD_SHUFFLED, *CONVERT)
    assert main(["check", *map(str, paths), *CONVERT, "--json"]) == 0
    offline = json.loads(capsys.readouterr().out)
    for value in (online, offline):
        for engine_side in ("prefill", "decode"):
            del value[engine_side]["source"]
    assert offline == online
