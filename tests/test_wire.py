"""The wire: what goes in comes out, what is foreign is left alone, what is wrong has a name."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvpd import EngineDescription, PlaneSpan, Region, negotiate, wire
from kvpd.errors import DescriptionError, WireError, WireVersionError
from tests.engine_builder import LAYERS, engine, facts, page_format, regions


def handshake(description: EngineDescription | None = None) -> wire.Handshake:
    return wire.Handshake("engine-7", description or engine(), b"\x00nixl\xff")


def unpacked(blob: bytes) -> dict[str, Any]:
    """Our body as plain values, by a decoder that knows nothing of kvpd's structs."""
    tag = msgspec.msgpack.decode(msgspec.msgpack.decode(blob)["kvpd"])
    assert set(tag) == {"version", "body"}
    body: dict[str, Any] = tag["body"]
    return body


def packed(body: Any, version: Any = wire.WIRE_VERSION, **more: Any) -> bytes:
    tag = msgspec.msgpack.encode({"version": version, "body": body, **more})
    return msgspec.msgpack.encode({"kvpd": tag})


def body() -> dict[str, Any]:
    return unpacked(wire.encode(handshake()))


DESCRIPTIONS = {
    "standard LBHNC": engine(),
    "standard LHBNC, a region per head": engine(layout="LHBNC"),
    "standard NHC in LBNHC": engine(layout="LBNHC", format_changes={"interior": "NHC"}),
    "shuffled LHBNC, two planes": engine("aiter_shuffle", "LHBNC"),
    "shuffled LBHNC": engine("aiter_shuffle", "LBHNC"),
    "shuffled, transposed V": engine("aiter_shuffle", "LHBNC", format_changes={"v": "transposed"}),
    "split": engine("split_kv", "LHBNC"),
    "of whose model nothing is known": engine(model_config=None, model_weights=None),
    "with scales that nobody knows": engine(quantised_cache=True, cache_dtype="float8_e5m2"),
    "untagged region": EngineDescription(facts(), [Region(4096, 3, 64, 128, layers=["a"])]),
    "strided, on a device, at the top of memory": EngineDescription(
        facts(
            tp_size=2,
            tp_rank=1,
            pp_size=3,
            num_kv_groups=2,
            uses_mla=True,
            hybrid_manager=True,
            speculative="eagle",
            quantization="fp8",
            cache_dtype="float8_e4m3fn",
            cache_dtype_setting="fp8",
            quantised_cache=True,
            scales=[("a", [0.1], [1e-30]), ("b", [0.5, 2.0], [3.0])],
        ),
        [
            Region(
                2**63 + 4096,
                3,
                page_format().page_bytes,
                page_format().page_bytes + 256,
                format=page_format(),
                planes=[0],
                layers=["a", "b"],
                memory="vram",
                device=3,
                extent_bytes=4 * (page_format().page_bytes + 256),
            )
        ],
    ),
}


@pytest.mark.parametrize("name", DESCRIPTIONS)
def test_what_goes_in_comes_out(name: str) -> None:
    sent = handshake(DESCRIPTIONS[name])
    got = wire.decode(wire.encode(sent))
    assert got is not None
    assert (got.engine_id, got.nixl_metadata) == (sent.engine_id, sent.nixl_metadata)
    assert got.description == sent.description
    # Equality of descriptions is the core's; the parts that matter are compared one by one too.
    assert got.description.facts == sent.description.facts
    assert len(got.description.regions) == len(sent.description.regions)
    fields = ["address", "num_blocks", "block_bytes", "block_stride_bytes", "extent_bytes"]
    fields += ["memory", "device", "planes", "layers", "format"]
    for a, b in zip(got.description.regions, sent.description.regions, strict=True):
        assert [getattr(a, name) for name in fields] == [getattr(b, name) for name in fields]


def test_a_format_travels_once_however_many_regions_have_it() -> None:
    sent = body()
    assert len(sent["formats"]) == 1
    assert [region["format"] for region in sent["regions"]] == [0] * len(LAYERS)


def test_a_map_without_our_key_is_an_untagged_peer() -> None:
    assert wire.decode(msgspec.msgpack.encode({})) is None
    assert wire.decode(msgspec.msgpack.encode({"engine_id": "x", "block_lens": [1, 2]})) is None
    assert wire.decode(msgspec.msgpack.encode({"kvpd": None})) is None


@dataclass
class StockMetadata:
    """What a decoder that has never heard of kvpd decodes into."""

    engine_id: str
    agent_metadata: bytes
    block_lens: list[int]
    kv_cache_layout: str


def test_a_carrier_with_our_key_still_decodes_for_those_who_do_not_know_it() -> None:
    stock = StockMetadata("stock", b"\x01\x02", [8192, 8192], "LBHNC")
    blob = msgspec.msgpack.encode(stock)
    tagged = wire.attach(blob, handshake())
    assert msgspec.msgpack.decode(tagged, type=StockMetadata) == stock
    got = wire.decode(tagged)
    assert got is not None and got.description == handshake().description
    with pytest.raises(WireError) as caught:
        wire.attach(tagged, handshake())
    assert caught.value.code == "duplicate-key"


def packed_envelope(envelope: Any) -> bytes:
    return msgspec.msgpack.encode({"kvpd": msgspec.msgpack.encode(envelope)})


def test_an_engine_of_wire_version_1_is_refused_by_name() -> None:
    """The file is what kvpd published before its wire had fingerprints."""
    tag = (Path(__file__).parent / "vectors/tag_v1.msgpack").read_bytes()
    with pytest.raises(WireVersionError) as caught:
        wire.decode_tag(tag)
    error = caught.value
    assert (error.code, error.field, error.got, error.expected) == (
        "wire-version",
        "version",
        "1",
        "2",
    )
    assert "run the same kvpd release on both sides" in str(error)


def test_an_engine_of_wire_version_1_refuses_us_by_name() -> None:
    """It reads the version and no more: the struct is that of its envelope, written out anew."""

    class EnvelopeOfVersion1(msgspec.Struct):
        version: int
        body: msgspec.Raw = msgspec.Raw()

    ours = msgspec.msgpack.decode(wire.encode_tag(handshake()), type=EnvelopeOfVersion1)
    theirs_tag = (Path(__file__).parent / "vectors/tag_v1.msgpack").read_bytes()
    theirs = msgspec.msgpack.decode(theirs_tag, type=EnvelopeOfVersion1)
    assert (ours.version, theirs.version) == (2, 1)


def test_a_later_version_may_have_no_body_at_all() -> None:
    with pytest.raises(WireVersionError):
        wire.decode(packed_envelope({"version": wire.WIRE_VERSION + 1}))
    with pytest.raises(WireError) as caught:
        wire.decode(packed_envelope({"version": wire.WIRE_VERSION}))
    assert not isinstance(caught.value, WireVersionError)


def test_the_proofs_a_message_can_ask_for_are_bounded_together() -> None:
    sent = body()
    large = dict(sent["formats"][0], plane_bytes=[wire.MAX_FORMAT_BYTES])
    sent["formats"] = [large, large]
    with pytest.raises(WireError) as caught:
        wire.decode(packed(sent))
    assert (caught.value.code, caught.value.field) == (
        "too-many-format-bytes",
        "formats[1].plane_bytes",
    )


def test_planes_must_be_named_beside_a_format() -> None:
    sent = body()
    sent["regions"][0]["planes"] = []
    with pytest.raises(WireError) as caught:
        wire.decode(packed(sent))
    assert (caught.value.code, caught.value.field) == ("planes", "regions[0].planes")


def test_unknown_fields_are_ignored_at_every_level() -> None:
    extra = {"of a later release": [1, {"deeper": None}], "x": 1.5}
    sent = body()
    sent.update(extra)
    sent["facts"].update(extra)
    for level in (sent["formats"], sent["regions"], sent["formats"][0]["components"]):
        for item in level:
            item.update(extra)
    for region in sent["regions"]:
        for span in region["planes"]:
            span.update(extra)
    got = wire.decode(packed(sent, more=extra))
    assert got is not None and got.description == handshake().description


@pytest.mark.parametrize("version", [0, wire.WIRE_VERSION + 1, 2**63])
def test_another_version_is_an_answer_and_its_body_is_not_looked_at(version: int) -> None:
    for later_body in ({"a": "body", "of": "another shape"}, [1, 2], None, b"\xc1"):
        with pytest.raises(WireVersionError) as caught:
            wire.decode(packed(later_body, version=version))
        assert (caught.value.code, caught.value.field) == ("wire-version", "version")
        assert caught.value.got == str(version)
        assert caught.value.expected == str(wire.WIRE_VERSION)


def test_every_truncation_is_refused() -> None:
    blob = wire.encode(handshake())
    for length in range(len(blob)):
        with pytest.raises(WireError):
            wire.decode(blob[:length])
    tag = msgspec.msgpack.decode(blob)["kvpd"]
    for length in range(len(tag)):
        with pytest.raises(WireError):
            wire.decode(msgspec.msgpack.encode({"kvpd": tag[:length]}))


def set_at(value: Any, path: str, new: Any) -> Any:
    """Replace what lies at a path such as ``regions.0.address``."""
    *parents, last = path.split(".")
    inner = value
    for part in parents:
        inner = inner[int(part) if part.isdigit() else part]
    inner[int(last) if last.isdigit() else last] = new
    return value


WRONG = [
    ("engine_id", 7, "invalid-field", "engine_id"),
    ("engine_id", "", "invalid-field", "engine_id"),
    ("engine_id", "x" * 257, "invalid-field", "engine_id"),
    ("nixl_metadata", "text", "invalid-field", "nixl_metadata"),
    ("facts", None, "invalid-field", "facts"),
    ("facts.model", b"bytes", "invalid-field", "facts.model"),
    ("facts.model", "m" * 513, "invalid-field", "facts.model"),
    ("facts.tp_size", -1, "invalid-field", "facts.tp_size"),
    ("facts.tp_size", 2**64 - 1, "invalid-field", "facts.tp_size"),
    ("facts.tp_size", 1.0, "invalid-field", "facts.tp_size"),
    ("facts.tp_size", True, "invalid-field", "facts.tp_size"),
    ("facts.uses_mla", 0, "invalid-field", "facts.uses_mla"),
    ("facts.pp_size", 0, "out-of-range", "facts.pp_size"),
    ("facts.hybrid_manager", 1, "invalid-field", "facts.hybrid_manager"),
    ("facts.speculative", "", "text", "facts.speculative"),
    ("facts.model_weights", "", "text", "facts.model_weights"),
    ("facts.model_weights", "w" * 513, "invalid-field", "facts.model_weights"),
    ("facts.model_config", [], "invalid-field", "facts.model_config"),
    ("facts.model_config", {"a": 1}, "invalid-field", "facts.model_config"),
    ("facts.model_config", {"a": "\n"}, "text", "facts.model_config"),
    ("facts.model_config", {"a": "x" * 4097}, "invalid-field", "facts.model_config"),
    (
        "facts.model_config",
        {f"f{index}": "1" for index in range(257)},
        "invalid-field",
        "facts.model_config",
    ),
    ("facts.scales", [["a", [1.0], [1.0]]], "scales-of-plain-cache", "facts.scales"),
    ("facts.scales", [["a", [1.0]]], "invalid-field", "facts.scales"),
    ("facts.scales", [["a", ["1"], [1.0]]], "invalid-field", "facts.scales"),
    ("facts.scales", [["a", [math.nan], [1.0]]], "scale-value", "scales of layer a"),
    ("facts.scales", [["a", [1.0], [math.inf]]], "scale-value", "scales of layer a"),
    ("facts.scales", [["a", [0.0], [1.0]]], "scale-value", "scales of layer a"),
    ("facts.scales", [["a", [1.0], [1.0]]] * 4097, "invalid-field", "facts.scales"),
    ("formats", {}, "invalid-field", "formats"),
    ("formats.0.digest", "0" * 64, "digest", "formats[0].digest"),
    ("formats.0.components.0.base_bytes", 2**63 - 1, None, "formats[0]"),
    ("formats.0.components.0.base_bytes", 2, None, "formats[0]"),
    ("formats.0.components.0.heads", 0, None, "formats[0]"),
    ("formats.0.components.0.token_tile", 0, None, "formats[0]"),
    ("formats.0.components.0.dtype", "int3", None, "formats[0]"),
    ("formats.0.components.0.plane", 5, None, "formats[0]"),
    ("formats.0.components", [], None, "formats[0]"),
    ("formats.0.plane_bytes", [2**63 - 1], None, "formats[0]"),
    ("regions.1.format", 1, "format-index", "regions[1].format"),
    ("regions.1.format", "0", "invalid-field", "regions[1].format"),
    ("regions.1.address", -1, "invalid-field", "regions[1].address"),
    ("regions.1.address", 2**64 - 1, None, "regions[1]"),
    ("regions.1.num_blocks", 2**31 - 1, None, "regions[1]"),
    ("regions.1.block_bytes", 2**63 - 1, None, "regions[1]"),
    ("regions.1.block_stride_bytes", 1, None, "regions[1]"),
    ("regions.1.extent_bytes", 1, None, "regions[1]"),
    ("regions.1.memory", "disk", "invalid-field", "regions[1].memory"),
    ("regions.1.planes.0.plane", 9, None, "regions[1]"),
    ("regions.1.layers", ["layer.0"], None, "regions"),
    ("regions.1.layers", ["x"] * 2000, "invalid-field", "regions[1].layers"),
    ("regions.1", None, "invalid-field", "regions[1]"),
]


@pytest.mark.parametrize(("path", "new", "code", "field"), WRONG)
def test_a_wrong_field_is_named(path: str, new: Any, code: str | None, field: str) -> None:
    blob = packed(set_at(body(), path, new))
    with pytest.raises(WireError) as caught:
        wire.decode(blob)
    assert field in caught.value.field
    assert caught.value.code and code in (None, caught.value.code)


@pytest.mark.parametrize("path", ["engine_id", "facts", "formats", "regions", "nixl_metadata"])
def test_a_missing_field_is_refused(path: str) -> None:
    sent = body()
    del sent[path]
    with pytest.raises(WireError, match=path):
        wire.decode(packed(sent))


def test_whatever_an_engine_can_publish_is_read() -> None:
    description = engine(model="m" * 512, connector="c" * 512)
    sent = wire.decode(wire.encode(handshake(description)))
    assert sent is not None and sent.description == description
    with pytest.raises(DescriptionError) as caught:
        engine(model="m" * 513)
    assert (caught.value.code, caught.value.expected) == ("text", "1 to 512 printable bytes")


def test_limits_hold_for_those_who_send_too() -> None:
    with pytest.raises(WireError) as caught:
        wire.encode(wire.Handshake("x" * 257, engine()))
    assert caught.value.code == "invalid-field"
    with pytest.raises(WireError) as caught:
        wire.encode(wire.Handshake("x", engine(), bytes(wire.MAX_BYTES)))
    assert caught.value.code == "oversized"


def test_too_many_bytes_regions_formats_or_values() -> None:
    with pytest.raises(WireError) as caught:
        wire.decode(b"\x80" + bytes(wire.MAX_BYTES))
    assert caught.value.code == "oversized"
    sent = body()
    sent["regions"] = [sent["regions"][0]] * (wire.MAX_REGIONS + 1)
    with pytest.raises(WireError) as caught:
        wire.decode(packed(sent))
    assert (caught.value.code, caught.value.field) == ("invalid-field", "kvpd.body.regions")
    sent = body()
    sent["formats"] *= wire.MAX_FORMATS + 1
    with pytest.raises(WireError) as caught:
        wire.decode(packed(sent))
    assert (caught.value.code, caught.value.field) == ("invalid-field", "kvpd.body.formats")


def test_deep_nesting_is_a_wire_error() -> None:
    for lead in (b"\x91", b"\x81\xa1k"):
        with pytest.raises(WireError) as caught:
            wire.decode(b"\x81\xa1a" + lead * 1_000_000 + b"\xc0")
        assert caught.value.code == "malformed"


@pytest.mark.parametrize(
    ("blob", "code"),
    [
        (b"", "malformed"),
        (b"\xc1", "malformed"),
        (b"\xc0", "invalid-field"),
        (b"\x90", "invalid-field"),
        (b"\x80\x80", "malformed"),
        (b"\xdf\xff\xff\xff\xff", "malformed"),
        (b"\xdd\xff\xff\xff\xff", "invalid-field"),
        (b"\xc6\xff\xff\xff\xff", "malformed"),
        (b"\x81\x90\x01", "invalid-field"),
        (b"\x81\xa4kvpd\x01", "invalid-field"),
        (b"\x81\xa4kvpd\xa1x", "invalid-field"),
        (b"\x81\xa4kvpd\xc4\x00", "malformed"),
        (b"\x81\xa4kvpd\xc4\x01\x80", "invalid-field"),
    ],
)
def test_bytes_that_are_no_handshake(blob: bytes, code: str) -> None:
    with pytest.raises(WireError) as caught:
        wire.decode(blob)
    assert caught.value.code == code


def test_text_that_is_not_utf8_is_refused() -> None:
    sent = packed(set_at(body(), "facts.model", "@@@@"))
    with pytest.raises(WireError) as caught:
        wire.decode(sent.replace(b"@@@@", b"\xff\xfe@@"))
    assert caught.value.code == "malformed"


def test_padding_travels() -> None:
    plain = page_format("split_kv")
    spare = PlaneSpan(0, plain.plane_bytes[0], 64)
    planes = (plain.plane_bytes[0] + 64, plain.plane_bytes[1])
    padded = type(plain).from_components("padded", plain.components, planes, [spare])
    description = EngineDescription(
        facts(), [Region(4096, 2, sum(planes), sum(planes), format=padded, planes=[0, 1],
                         layers=["a"])]
    )  # fmt: skip
    got = wire.decode(wire.encode(handshake(description)))
    assert got is not None
    assert got.description.format == padded != plain
    assert padded.padding == (spare,)


# "name-the-factor": peers that differ in one thing, judged after the wire.
FACTORS: dict[str, tuple[EngineDescription, str, str, str, str]] = {
    "model, by what was loaded": (
        engine(model_weights="weights 2"),
        "model-weights",
        "model_weights",
        "weights 1 of some/model",
        "weights 2 of some/model",
    ),
    "model, by name where that is all": (
        engine(model="other/model", model_weights=None),
        "model",
        "model",
        "some/model",
        "other/model",
    ),
    "KV dtype": (
        engine(cache_dtype="fp8_e5m2"),
        "cache-dtype",
        "cache_dtype",
        "bfloat16",
        "fp8_e5m2",
    ),
    "TP": (engine(tp_size=2), "tp-size", "tp_size", "1", "2"),
    "layers": (
        engine(layers=(*LAYERS, "layer.3", "layer.4")),
        "layers",
        "layers",
        "3 layers, without layer.3, layer.4",
        "5 layers",
    ),
}


@pytest.mark.parametrize("factor", FACTORS)
def test_name_the_factor(factor: str) -> None:
    remote, code, field, ours, theirs = FACTORS[factor]
    got = wire.decode(wire.encode(handshake(remote)))
    assert got is not None
    verdict = negotiate(engine(), got.description)
    assert verdict.kind == "refuse"
    assert [(r.code, r.field, r.local, r.remote) for r in verdict.reasons] == [
        (code, field, ours, theirs)
    ]
    assert ours in str(verdict) and theirs in str(verdict)


def test_name_the_factor_28_layers_against_30_with_two_that_share() -> None:
    names = tuple(f"layer.{index}" for index in range(30))
    shared = {"layer.28", "layer.29"}
    local = engine(layers=tuple(name for name in names if name not in shared))
    got = wire.decode(wire.encode(handshake(engine(layers=names))))
    assert got is not None
    (reason,) = negotiate(local, got.description).reasons
    assert reason.code == "layers"
    assert all(name in reason.local for name in shared)
    assert regions(page_format())[0].layers == ("layer.0",)


@pytest.mark.parametrize("start", [None, bytes(range(16))])
def test_the_start_id_comes_through(start: bytes | None) -> None:
    sent = replace(handshake(), start=start)
    came = wire.decode(wire.encode(sent))
    assert came is not None and came.start == start
    # An engine that does not answer has the bytes that it would have without the field.
    assert ("start" in unpacked(wire.encode(sent))) == (start is not None)


@pytest.mark.parametrize("start", [b"", bytes(15), bytes(17), "0" * 16, 5])
def test_a_start_id_of_another_size_is_refused(start: object) -> None:
    with pytest.raises(WireError) as caught:
        wire.decode(packed(body() | {"start": start}))
    assert caught.value.field == "kvpd.body.start"
