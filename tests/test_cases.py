"""Every case of tests/vectors/cases.json that the core decides; docs/cases.md lists all of them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import kvpd

ROOT = Path(__file__).parents[1]
CASES = {case["id"]: case for case in json.loads((ROOT / "tests/vectors/cases.json").read_text())}
FACTS: dict[str, Any] = {
    "model": "qwen3-8b",
    "model_dtype": "bfloat16",
    "cache_dtype": "bfloat16",
    "total_kv_heads": 8,
    "head_dim": 128,
    "block_size": 16,
    "layout": "LBHNC",
    "backend": "FLASH_ATTN",
    "release": "0.33.0",
    "connector": "kvpd 1",
}


def formats(
    heads: int, tokens: int = 16, head_dim: int = 128, dtype: str = "bfloat16"
) -> tuple[kvpd.PageFormat, kvpd.PageFormat]:
    """(standard, AITER shuffle) of one shape."""
    shape: dict[str, Any] = {
        "heads": heads,
        "tokens": tokens,
        "head_dim": head_dim,
        "dtype": dtype,
    }
    return kvpd.PageFormat.standard(**shape), kvpd.PageFormat.aiter_shuffle(**shape)


def engine(
    format: kvpd.PageFormat, layout: str, layers: int = 2, **facts: Any
) -> kvpd.EngineDescription:
    names = [f"layers.{layer}" for layer in range(layers)]
    regions = kvpd.cache_regions(format, layout, address=1 << 20, num_blocks=8, layers=names)
    return kvpd.EngineDescription(kvpd.EngineFacts(**(FACTS | facts)), regions)


def codes(verdict: kvpd.Verdict) -> list[str]:
    return [reason.code for reason in verdict.reasons]


def geometry(description: kvpd.EngineDescription) -> list[int]:
    return [region.block_bytes for region in description.regions]


def test_same_geometry_other_bytes() -> None:
    sizes = {
        1: ([8192], [4096] * 2),
        2: ([8192] * 2, [8192] * 2),
        4: ([8192] * 4, [16384] * 2),
        8: ([8192] * 8, [32768] * 2),
    }
    for heads, (packed_bytes, shuffled_bytes) in sizes.items():
        standard, shuffled = formats(heads)
        packed_engine = engine(standard, "LHBNC", 1)
        shuffled_engine = engine(shuffled, "LHBNC", 1)
        assert geometry(packed_engine) == packed_bytes
        assert geometry(shuffled_engine) == shuffled_bytes
        for convert in (False, True):
            for local, remote in (
                (packed_engine, shuffled_engine),
                (shuffled_engine, packed_engine),
            ):
                assert kvpd.negotiate(local, remote, convert=convert).kind != "identical"
        assert codes(kvpd.negotiate(shuffled_engine, None, convert=True)) == ["untagged-peer"]
    standard, shuffled = formats(8)
    joint = engine(standard, "LBHNC", 1), engine(shuffled, "LBHNC", 1)
    assert geometry(joint[0]) == geometry(joint[1]) == [65536]
    assert kvpd.negotiate(joint[1], joint[0]).kind == "refuse"


def test_shuffled_page_cut_by_bytes() -> None:
    _, whole = formats(8)
    assert whole.page_bytes == 65536
    for rank in range(2):
        for head in range(4 * rank, 4 * rank + 4):
            for name, plane_start in (("k", 0), ("v", 32768)):
                for token, channel in ((0, 0), (15, 127)):
                    _, offset = whole.offset(name, head, token, channel)
                    assert 16384 * rank <= offset < 16384 * (rank + 1)
                    in_page = plane_start + offset
                    cut = 32768 * rank <= in_page < 32768 * (rank + 1)
                    # A cut by bytes gives rank 0 only K, and rank 1 only V.
                    assert cut == ((name == "v") == (rank == 1))
    _, half = formats(4)
    local = engine(half, "LBHNC", tp_size=2, tp_rank=1)
    verdict = kvpd.negotiate(local, engine(whole, "LBHNC"), convert=True)
    assert [(r.code, r.local, r.remote) for r in verdict.reasons] == [("tp-size", "2", "1")]


def test_shape_is_ambiguous() -> None:
    """Nothing takes a tensor's shape: a format is declared, or the region is untagged."""
    strides = (8192 * 2, 256 * 2)
    region = kvpd.Region(0, 97871, strides[0], strides[0], layers=["layers.0"])
    assert region.format is None and region.planes == ()
    untagged = kvpd.EngineDescription(kvpd.EngineFacts(**FACTS), [region])
    verdict = kvpd.negotiate(untagged, untagged, convert=True)
    assert codes(verdict) == ["untagged-region"]


def test_length_over_stride() -> None:
    with pytest.raises(kvpd.RegionError) as error:
        kvpd.Region(0, 12, 884736, 73728)
    assert error.value.code == "length-over-stride"
    assert error.value.got == "884736" and "73728" in error.value.expected
    assert kvpd.Region(0, 12, 73728, 73728).is_dense


def test_capacity_per_region() -> None:
    format = kvpd.PageFormat.standard(heads=1, tokens=1, head_dim=4, dtype="bfloat16")
    regions = [
        kvpd.Region(100, 2, 16, 16, format=format, layers=["a"]),
        kvpd.Region(1000, 3, 16, 16, format=format, layers=["b"]),
    ]
    plan = kvpd.TransferPlan(regions, regions)
    addresses = [
        int(row[0]) + block * int(row[3]) for row in plan.local_rows for block in range(int(row[4]))
    ]
    assert addresses == [100, 116, 1000, 1016, 1032]
    local, _ = plan.descriptor_ids(kvpd.runs([0, 1], [0, 1]))
    assert local.tolist() == [0, 1, 2, 3]


def test_element_type_first() -> None:
    prefill, _ = formats(8)
    _, decode = formats(8, dtype="float8_e4m3fn")
    assert (prefill.plane_bytes, decode.plane_bytes) == ((65536,), (16384, 16384))
    local = engine(decode, "LHBNC", cache_dtype="fp8")
    verdict = kvpd.negotiate(local, engine(prefill, "LBHNC"), convert=True)
    first = verdict.reasons[0]
    assert (first.code, first.field) == ("element-type", "dtype")
    assert (first.local, first.remote) == ("float8_e4m3fn", "bfloat16")
    assert "bytes" not in {reason.field for reason in verdict.reasons}


def test_equal_sizes_other_order() -> None:
    shape: dict[str, Any] = {"heads": 8, "tokens": 32, "head_dim": 128, "dtype": "bfloat16"}
    hnc = kvpd.PageFormat.split_kv(**shape, interior="HNC")
    nhc = kvpd.PageFormat.split_kv(**shape, interior="NHC")
    assert hnc.page_bytes == nhc.page_bytes
    assert codes(kvpd.negotiate(hnc, nhc, convert=True)) == ["pair-out-of-scope"]


def test_fp8_flavours() -> None:
    fn, fnuz = formats(2, dtype="float8_e4m3fn")[0], formats(2, dtype="float8_e4m3fnuz")[0]
    verdict = kvpd.negotiate(fn, fnuz, convert=True)
    (reason,) = verdict.reasons
    assert (reason.code, reason.local, reason.remote) == (
        "element-type",
        "float8_e4m3fn",
        "float8_e4m3fnuz",
    )


def test_merge_two_blocks_into_one() -> None:
    """Where the element goes is known; moving it there waits for unequal block sizes."""
    shape: dict[str, Any] = {"heads": 2, "head_dim": 16, "dtype": "bfloat16"}
    small = kvpd.PageFormat.standard(tokens=16, **shape)
    large = kvpd.PageFormat.aiter_shuffle(tokens=32, **shape)
    assert large.offset("k", 1, 20, 9) == (0, 2 * 929)
    assert large.offset("v", 1, 20, 9) == (1, 2 * 844)
    (reason,) = kvpd.negotiate(large, small, convert=True).reasons
    assert (reason.code, reason.local, reason.remote) == ("block-size", "32", "16")


def test_tail_of_a_shuffled_page() -> None:
    """The bytes of tokens 8 and later of a 16-token page, by the stripes the case names."""
    heads, tokens, head_dim, x = 2, 16, 128, 8
    _, shuffled = formats(heads)
    tail = {"k": set(), "v": set()}  # type: dict[str, set[int]]
    for name, found in tail.items():
        for head in range(heads):
            for token in range(8, tokens):
                for channel in range(head_dim):
                    found.add(shuffled.offset(name, head, token, channel)[1] // 2)
    k = {
        h * head_dim * tokens + g * tokens * x + 8 * x + i
        for h in range(heads)
        for g in range(head_dim // x)
        for i in range(8 * x)
    }
    v = {
        h * head_dim * tokens + i
        for h in range(heads)
        for i in range(8 * head_dim, head_dim * tokens)
    }
    assert tail == {"k": k, "v": v}


def test_real_stride_wins() -> None:
    element_bytes, dense, stride = 2, 4096, 8192
    _, shuffled = formats(2)
    k = kvpd.Region(
        0,
        4,
        dense * element_bytes,
        stride * element_bytes,
        format=shuffled,
        planes=[0],
        layers=["a"],
    )
    assert k.block_address(3) == 3 * stride * element_bytes
    assert not k.is_dense


NAMED: list[tuple[str, Any, str]] = [
    ("model", "llama-3", "model"),
    ("model_dtype", "float16", "model_dtype"),
    ("speculative", "eagle3", "speculative"),
    ("pp_size", 2, "pp_size"),
    ("cache_dtype", "fp8", "cache_dtype"),
    ("tp_size", 2, "tp_size"),
]


# Of facts that are not given.
DEFAULTS = {"tp_size": 1, "pp_size": 1, "speculative": "none"}


@pytest.mark.parametrize(("fact", "value", "field"), NAMED)
def test_name_the_factor(fact: str, value: Any, field: str) -> None:
    standard, shuffled = formats(8)
    local, remote = engine(shuffled, "LHBNC"), engine(standard, "LBHNC", **{fact: value})
    (reason,) = kvpd.negotiate(local, remote, convert=True).reasons
    assert (reason.field, reason.local, reason.remote) == (
        field,
        str({**DEFAULTS, **FACTS}[fact]),
        str(value),
    )


def test_one_name_other_weights() -> None:
    """What was loaded decides, whatever it is called; with real engines: tests/vllm."""
    standard, _ = formats(8)
    known = {"model_config": {"hidden_size": "4096"}, "model_weights": "revision 1"}

    def side(**facts: Any) -> kvpd.EngineDescription:
        return engine(standard, "LBHNC", **(known | facts))

    (reason,) = kvpd.negotiate(side(), side(model_weights="revision 2")).reasons
    assert (reason.code, reason.local, reason.remote) == (
        "model-weights",
        "revision 1 of qwen3-8b",
        "revision 2 of qwen3-8b",
    )
    for same in (
        side(model="/models/Qwen3-8B"),
        side(cache_dtype_setting="auto"),
        side(cache_dtype_setting="bfloat16"),
    ):
        verdict = kvpd.negotiate(side(), same)
        assert verdict.kind == "identical" and not verdict.warnings
    # Where one side does not know, names are all there is, and that is said.
    verdict = kvpd.negotiate(side(), side(model_weights=None))
    assert [warning.code for warning in verdict.warnings] == ["model-unproved"]
    spelt = side(model="/models/Qwen3-8B", model_weights=None)
    assert codes(kvpd.negotiate(side(), spelt)) == ["model"]


def test_hybrid_default() -> None:
    """The layers, their formats and the switch; nothing is printed of both sides alike."""
    sides = []
    for format in reversed(formats(8)):
        # Under the hybrid manager a full and a sliding-window layer share their pages.
        names = [["layers.0", "layers.2"], ["layers.1", "layers.3"]]
        regions = [
            kvpd.Region(
                (1 + index) << 20, 8, format.page_bytes, format.page_bytes, format=format,
                planes=range(len(format.plane_bytes)), layers=layers,
            )
            for index, layers in enumerate(names)
        ]  # fmt: skip
        facts = FACTS | {"num_kv_groups": 2, "hybrid_manager": True}
        sides.append(kvpd.EngineDescription(kvpd.EngineFacts(**facts), regions))
    verdict = kvpd.negotiate(*sides, convert=True)
    (reason,) = [reason for reason in verdict.reasons if reason.code == "hybrid"]
    layers = "layers.0 sharing its pages with layers.2, layers.1 sharing its pages with layers.3"
    assert f"{layers} in aiter-shuffle" in reason.local
    assert f"{layers} in standard" in reason.remote
    assert "--disable-hybrid-kv-cache-manager on both sides" in reason.remedy
    for reason in verdict.reasons:
        assert reason.local != reason.remote


def test_name_the_factor_layers() -> None:
    standard, shuffled = formats(8)
    verdict = kvpd.negotiate(
        engine(shuffled, "LHBNC", 28), engine(standard, "LBHNC", 30), convert=True
    )
    (reason,) = verdict.reasons
    assert reason.code == "layers"
    assert reason.local == "28 layers, without layers.28, layers.29"
    assert reason.remote == "30 layers"


def test_joint_against_split() -> None:
    _, shuffled = formats(8)
    verdict = kvpd.negotiate(engine(shuffled, "LHBNC"), engine(shuffled, "LBHNC"), convert=True)
    (reason,) = verdict.reasons
    assert reason.code == "pages-held-differently"
    assert reason.local.startswith("2 regions a layer")
    assert reason.remote.startswith("1 region a layer")


def test_heads_do_not_divide() -> None:
    standard, _ = formats(2)
    for heads, local_tp, remote_tp in ((10, 4, 4), (6, 4, 2)):
        local, remote = (
            engine(standard, "LBHNC", total_kv_heads=heads, tp_size=tp)
            for tp in (local_tp, remote_tp)
        )
        assert "heads-not-divisible" in codes(kvpd.negotiate(local, remote))


def test_k_and_v_tagged_apart() -> None:
    shape: dict[str, Any] = {"heads": 8, "tokens": 16, "head_dim": 128, "dtype": "bfloat16"}
    tiled = kvpd.PageFormat.aiter_shuffle(**shape, v="tiled")
    transposed = kvpd.PageFormat.aiter_shuffle(**shape, v="transposed")
    assert tiled != transposed and tiled.digest != transposed.digest
    assert kvpd.negotiate(tiled, transposed, convert=True).kind == "refuse"


def test_hybrid_and_mla() -> None:
    standard, shuffled = formats(8)
    for facts, code in (({"num_kv_groups": 2}, "hybrid"), ({"uses_mla": True}, "mla")):
        local, remote = engine(shuffled, "LHBNC", **facts), engine(standard, "LBHNC", **facts)
        assert kvpd.negotiate(local, local).kind == "identical"
        assert codes(kvpd.negotiate(local, remote, convert=True)) == [code]


def test_every_case_is_accounted_for() -> None:
    """docs/cases.md names a test that exists for each case, or what the case waits for."""
    table = dict(
        re.findall(r"^\| `([a-z0-9-]+)` \| (.+?) \|$", (ROOT / "docs/cases.md").read_text(), re.M)
    )
    assert set(table) == set(CASES)
    for case, where in table.items():
        for path, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", where):
            assert f"def {name}" in (ROOT / path).read_text(), f"{case}: {path} has no {name}"
        assert "waits for" in where or "::" in where, case
