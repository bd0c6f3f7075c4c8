"""What is decided about a peer from two handshakes, field by field; needs no vLLM.

Tagged peers are judged by named factors and never by stock's digest, untagged ones by the exact
digest, and a digest that is not enforced leaves the verdict as it is.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from kvpd import EngineDescription, KvpdError, RefusedError, WireError
from kvpd.vllm.judgement import Digests, Judgement, Local, Policy, judge
from kvpd.wire import Handshake, encode_tag
from tests.engine_builder import engine

SAME = Digests("equal", "equal")
OTHER = Digests("ours", "theirs")
IGNORED = replace(OTHER, enforced=False)
CONVERT = Policy(convert=True)
SHUFFLED = Local(engine("aiter_shuffle", "LHBNC"))
STANDARD = Local(engine())


@dataclass
class Metadata:
    """The fields of stock's metadata that are looked at, as a peer of `description` sends them."""

    kvpd: bytes | None
    kv_caches_base_addr: list[int]
    num_blocks: int
    block_lens: list[int]
    block_strides: list[int]
    block_size: int = 16
    physical_blocks_per_logical_kv_block: int = 1
    region_num_blocks: list[int] | None = None
    engine_id: str = field(default="peer")


def peer(description: EngineDescription, *, is_tagged: bool = True, **changes: Any) -> Metadata:
    regions = description.regions
    honest = Metadata(
        encode_tag(Handshake("peer", description)) if is_tagged else None,
        [region.address for region in regions],
        regions[0].num_blocks,
        [region.block_bytes for region in regions],
        [region.block_stride_bytes for region in regions],
    )
    return replace(honest, **changes)


def test_an_honest_peer_is_accepted() -> None:
    """The control of everything below."""
    for local, kind in ((SHUFFLED, "convert"), (STANDARD, "identical")):
        judgement = judge(local, peer(engine()), SAME, CONVERT)
        assert isinstance(judgement, Judgement)
        assert judgement.verdict.kind == kind
        assert judgement.handshake is not None
    with_counts = peer(engine(), region_num_blocks=[11, 11, 11])
    assert judge(SHUFFLED, with_counts, SAME, CONVERT).verdict.kind == "convert"


@pytest.mark.parametrize("local", [SHUFFLED, STANDARD], ids=["convert", "identical"])
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("kv_caches_base_addr", lambda m: [a + 4096 for a in m.kv_caches_base_addr]),
        ("kv_caches_base_addr", lambda m: m.kv_caches_base_addr[::-1]),
        ("kv_caches_base_addr", lambda m: m.kv_caches_base_addr[:-1]),
        ("block_lens", lambda m: [*m.block_lens[:-1], m.block_lens[-1] // 2]),
        ("block_lens", lambda m: [*m.block_lens, m.block_lens[-1]]),
        ("block_strides", lambda m: [2 * stride for stride in m.block_strides]),
        ("num_blocks", lambda m: m.num_blocks + 1),
        ("region_num_blocks", lambda m: [11, 11, 12]),
        ("region_num_blocks", lambda m: [11, 11]),
        ("block_size", lambda m: 32),
    ],
)
def test_a_tag_that_contradicts_the_peers_own_metadata(
    local: Local, name: str, change: Any
) -> None:
    """The verdict rests on the tag and stock's path on the metadata: one of them would be wrong."""
    honest = peer(engine())
    changed = replace(honest, **{name: change(honest)})
    with pytest.raises(WireError) as caught:
        judge(local, changed, SAME, CONVERT)
    # One number stands for all regions where the peer has no list of its own.
    field = "region_num_blocks" if name == "num_blocks" else name
    assert (caught.value.code, caught.value.field) == ("tag-contradicts-metadata", field)
    assert caught.value.got != caught.value.expected


def test_a_tag_of_another_engine() -> None:
    with pytest.raises(KvpdError) as caught:
        judge(SHUFFLED, peer(engine(), engine_id="somebody"), SAME, CONVERT)
    assert (caught.value.code, caught.value.got, caught.value.expected) == (
        "engine-id",
        "peer",
        "somebody",
    )


@pytest.mark.parametrize("tag", [b"", b"\x00", b"not a tag"])
def test_a_tag_that_is_none(tag: bytes) -> None:
    with pytest.raises(WireError):
        judge(STANDARD, peer(engine(), kvpd=tag), SAME, CONVERT)


@pytest.mark.parametrize(("here", "there"), [(2, 1), (1, 2), (2, 2)])
def test_conversion_needs_whole_blocks(here: int, there: int) -> None:
    cut = peer(engine(), physical_blocks_per_logical_kv_block=there)
    with pytest.raises(KvpdError) as caught:
        judge(replace(SHUFFLED, kernel_blocks_per_block=here), cut, SAME, CONVERT)
    assert caught.value.code == "blocks-not-whole"


@pytest.mark.parametrize("is_tagged", [True, False])
def test_blocks_are_cut_alike(is_tagged: bool) -> None:
    """Of equal pages as well: stock pairs them from the end, which is padded differently."""
    cut = peer(engine(), is_tagged=is_tagged, physical_blocks_per_logical_kv_block=2)
    alike = judge(replace(STANDARD, kernel_blocks_per_block=2), cut, SAME, CONVERT)
    assert alike.verdict.kind == "identical" and not alike.is_whole
    for here in (1, 4):
        with pytest.raises(KvpdError) as caught:
            judge(replace(STANDARD, kernel_blocks_per_block=here), cut, SAME, CONVERT)
        assert caught.value.code == "blocks-not-whole"
        assert caught.value.got == f"{here} here, 2 there"


# Stock's digest is deferred, never waived


@pytest.mark.parametrize("digests", [SAME, OTHER, IGNORED])
def test_tagged_peers_are_not_judged_by_the_digest(digests: Digests) -> None:
    assert judge(STANDARD, peer(engine()), digests, Policy()).verdict.kind == "identical"
    assert judge(SHUFFLED, peer(engine()), digests, CONVERT).verdict.kind == "convert"


@pytest.mark.parametrize("digests", [SAME, OTHER, IGNORED])
@pytest.mark.parametrize(
    ("code", "changes"),
    [
        ("release", {"release": "0.32.0"}),
        ("connector", {"connector": "2"}),
        ("model", {"model": "other/model", "model_weights": None}),
        ("model-weights", {"model_weights": "weights 2"}),
        ("model-config", {"model_config": {"hidden_size": "2048"}}),
        ("quantization", {"quantization": "fp8"}),
        ("speculative", {"speculative": "eagle"}),
        ("pp-size", {"pp_size": 2}),
        ("hybrid-manager", {"num_kv_groups": 2, "hybrid_manager": True}),
        ("model-dtype", {"model_dtype": "float16"}),
        ("cache-dtype", {"cache_dtype": "fp8"}),
        ("total-kv-heads", {"total_kv_heads": 8}),
        ("head-dim", {"head_dim": 128}),
        ("block-size", {"block_size": 32}),
        ("tp-size", {"tp_size": 2}),
        ("kv-groups", {"num_kv_groups": 2}),
        ("mla", {"uses_mla": True}),
        ("layers", {"layers": ("layer.0", "layer.1")}),
    ],
)
def test_tagged_peers_are_judged_by_named_factors(
    code: str, changes: dict[str, Any], digests: Digests
) -> None:
    """Also where the digests are equal, or the operator told stock not to compare them."""
    other = peer(engine(**changes))
    for local in (STANDARD, SHUFFLED):
        with pytest.raises(RefusedError) as caught:
            judge(local, other, digests, CONVERT)
        assert code in [reason.code for reason in caught.value.verdict.reasons]


def test_what_is_no_factor() -> None:
    """Backends have names and builds have suffixes; neither moves a byte."""
    other = peer(
        engine(
            backend="TRITON_ATTN",
            release="0.33.0+rocm721",
            model="/elsewhere",
            cache_dtype_setting="auto",
            hybrid_manager=True,
        )
    )
    for digests in (SAME, OTHER):
        assert judge(STANDARD, other, digests, Policy()).verdict.kind == "identical"


def test_other_weights_are_accepted_where_the_operator_says_so() -> None:
    quantised = peer(engine(model="fp8", model_weights="weights 2", quantization="fp8"))
    allowed = Policy(convert=True, allow_other_weights=True)
    for local in (STANDARD, SHUFFLED):
        with pytest.raises(RefusedError):
            judge(local, quantised, SAME, CONVERT)
        verdict = judge(local, quantised, SAME, allowed).verdict
        assert [warning.code for warning in verdict.warnings] == ["quantization", "model-weights"]
    other_shape = peer(engine(model_weights="weights 2", model_config={"hidden_size": "2048"}))
    with pytest.raises(RefusedError) as caught:
        judge(STANDARD, other_shape, SAME, allowed)
    assert [reason.code for reason in caught.value.verdict.reasons] == ["model-config"]


def test_untagged_peers_are_judged_by_the_exact_digest() -> None:
    untagged = peer(engine(), is_tagged=False)
    accepted = judge(STANDARD, untagged, SAME, Policy())
    assert accepted.handshake is None
    assert [warning.code for warning in accepted.verdict.warnings] == ["untagged-peer"]
    with pytest.raises(KvpdError) as caught:
        judge(STANDARD, untagged, OTHER, Policy())
    assert (caught.value.code, caught.value.got, caught.value.expected) == (
        "stock-digest",
        "theirs",
        "ours",
    )
    # What stock's own switch skips is stock's comparison.
    assert judge(STANDARD, untagged, IGNORED, Policy()).verdict.kind == "identical"


@pytest.mark.parametrize("digests", [SAME, IGNORED])
def test_no_digest_stands_in_for_the_verdict(digests: Digests) -> None:
    for local, remote, policy in (
        (SHUFFLED, peer(engine(), is_tagged=False), CONVERT),
        (STANDARD, peer(engine(), is_tagged=False), Policy(require_tagged=True)),
        (SHUFFLED, peer(engine()), Policy()),
        (STANDARD, peer(engine("aiter_shuffle", "LHBNC")), CONVERT),
    ):
        with pytest.raises(RefusedError):
            judge(local, remote, digests, policy)


def test_ids_name_pages_only_where_a_block_is_one() -> None:
    """What is read directly is gathered by block ids: of one group, of one kernel block each."""
    one, two = engine(), engine(num_kv_groups=2)
    assert judge(Local(one), peer(one), SAME, Policy()).is_whole
    assert not judge(Local(two), peer(two), SAME, Policy()).is_whole
    coarse = peer(one, physical_blocks_per_logical_kv_block=4)
    assert not judge(Local(one, 4), coarse, SAME, Policy()).is_whole
    assert not judge(Local(one), peer(one, is_tagged=False), SAME, Policy()).is_whole
