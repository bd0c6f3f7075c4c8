"""The one door between handshake bytes and valid objects.

On the wire a handshake is one MessagePack map. Ours lives in it under the single key ``kvpd`` as a
byte string (the *tag*), so that a map with other keys, such as vLLM's agent metadata, can carry it
and a decoder that does not know the key skips it. The tag holds an envelope (version first) and the
body, which is decoded only when the version is ours.

What `decode` returns went through the core's constructors: formats are proved, regions are in
bounds, digests are recomputed. Whatever is wrong raises `WireError`; no other exception escapes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from kvpd._kvpd import (
    Component,
    EngineDescription,
    EngineFacts,
    PageFormat,
    PlaneSpan,
    Region,
)
from kvpd.direct.part import DirectPart
from kvpd.errors import KvpdError, WireError, WireVersionError

WIRE_VERSION = 2
KEY = "kvpd"
MAX_BYTES = 8 << 20
MAX_REGIONS = 4096
MAX_FORMATS = 64
# Bytes of one page of each format, together.
MAX_FORMAT_BYTES = 1 << 24

# As long as the core takes a name, or an engine could publish what no peer reads.
_Text = Annotated[str, msgspec.Meta(max_length=512)]
_Natural = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
# An address may use the top bit. MessagePack has no integer above 2**64 - 1.
_Address = Annotated[int, msgspec.Meta(ge=0)]
_Small = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class _Wire(msgspec.Struct, frozen=True, forbid_unknown_fields=False):
    """Base of all wire structs: fields that a later kvpd adds are skipped."""


class _Span(_Wire, frozen=True):
    plane: _Small
    start_bytes: _Natural
    num_bytes: _Natural


class _Component(_Wire, frozen=True):
    name: _Text
    dtype: _Text
    heads: _Small
    tokens: _Small
    channels: _Small
    plane: _Small
    base_bytes: _Natural
    head_stride_bytes: _Natural
    token_tile: _Small
    token_tile_stride_bytes: _Natural
    token_stride_bytes: _Natural
    channel_tile: _Small
    channel_tile_stride_bytes: _Natural
    channel_stride_bytes: _Natural


class _Format(_Wire, frozen=True):
    family: _Text
    digest: _Text
    components: Annotated[list[_Component], msgspec.Meta(max_length=16)]
    plane_bytes: Annotated[list[_Natural], msgspec.Meta(max_length=256)]
    padding: Annotated[list[_Span], msgspec.Meta(max_length=1024)]


class _Region(_Wire, frozen=True):
    address: _Address
    num_blocks: _Small
    block_bytes: _Natural
    block_stride_bytes: _Natural
    extent_bytes: _Natural
    memory: Literal["dram", "vram"]
    device: _Small
    format: _Small | None
    planes: Annotated[list[_Span], msgspec.Meta(max_length=256)]
    layers: Annotated[list[_Text], msgspec.Meta(max_length=1024)]


# Scales of K or of V of one layer: one, or one a head.
_Scales = Annotated[list[float], msgspec.Meta(max_length=1 << 16)]


class _Facts(_Wire, frozen=True):
    model: _Text
    model_config: (
        Annotated[
            dict[_Text, Annotated[str, msgspec.Meta(max_length=4096)]],
            msgspec.Meta(max_length=256),
        ]
        | None
    )
    model_weights: _Text | None
    quantization: _Text
    model_dtype: _Text
    cache_dtype: _Text
    cache_dtype_setting: _Text
    quantised_cache: bool
    # Per layer its name, the scales of K and those of V: three values in a row, since there may be
    # a hundred layers.
    scales: (
        Annotated[list[tuple[_Text, _Scales, _Scales]], msgspec.Meta(max_length=MAX_REGIONS)] | None
    )
    total_kv_heads: _Small
    head_dim: _Small
    block_size: _Small
    layout: _Text
    backend: _Text
    release: _Text
    connector: _Text
    speculative: _Text
    hybrid_manager: bool
    tp_size: _Small
    tp_rank: _Small
    pp_size: _Small
    num_kv_groups: _Small
    uses_mla: bool


class _Body(_Wire, frozen=True, omit_defaults=True):
    engine_id: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    facts: _Facts
    formats: Annotated[list[_Format], msgspec.Meta(max_length=MAX_FORMATS)]
    regions: Annotated[list[_Region], msgspec.Meta(max_length=MAX_REGIONS)]
    nixl_metadata: bytes
    # Of no handshake without direct placement: those have the bytes they always had.
    direct: DirectPart | None = None
    start: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)] | None = None


class _Envelope(_Wire, frozen=True):
    version: int
    # Optional to the decoder: another version may have no body, and is to be told so.
    body: msgspec.Raw = msgspec.Raw()


class _Carrier(_Wire, frozen=True):
    """The outer map. `kvpd` must equal `KEY`; every other key belongs to somebody else."""

    kvpd: bytes | None = None


@dataclass(frozen=True)
class Handshake:
    """What one rank of an engine tells a peer.

    Attributes:
        engine_id: the engine's name, 1 to 256 characters.
        description: facts and regions.
        nixl_metadata: what NIXL needs to reach the engine's agent; empty where the carrier of the
            handshake transports it itself.
        direct: an offer to map the regions' memory; None where there is none.
        start: 16 random bytes that are new whenever the cache is registered, of an engine that says
            whether it still holds a request's blocks; None of one that says not.
    """

    engine_id: str
    description: EngineDescription
    nixl_metadata: bytes = b""
    direct: DirectPart | None = None
    start: bytes | None = None


def encode(handshake: Handshake) -> bytes:
    """The handshake as one map that `decode` takes.

    Raises:
        WireError: it exceeds a limit that `decode` would refuse.
    """
    return _bounded(msgspec.msgpack.encode({KEY: encode_tag(handshake)}), "handshake")


def attach(blob: bytes, handshake: Handshake) -> bytes:
    """A foreign MessagePack map with our key added; all its own keys keep their values.

    Raises:
        WireError: `blob` is not a map with string keys, has our key already, or grows too large.
    """
    fields = _decode(dict[str, msgspec.Raw], _bounded(blob, "metadata"), "metadata")
    if KEY in fields:
        raise _error("duplicate-key", "metadata", KEY, "a map without our key")
    tagged: dict[str, Any] = {**fields, KEY: encode_tag(handshake)}
    return _bounded(msgspec.msgpack.encode(tagged), "metadata")


def encode_tag(handshake: Handshake) -> bytes:
    """Envelope and body, the value under our key.

    Raises:
        WireError: it exceeds a limit that `decode_tag` would refuse.
    """
    regions = handshake.description.regions
    formats = list(dict.fromkeys(r.format for r in regions if r.format is not None))
    index = {format: position for position, format in enumerate(formats)}
    body = _Body(
        engine_id=handshake.engine_id,
        facts=_copy(_Facts, handshake.description.facts),
        formats=[_format_to_wire(format) for format in formats],
        regions=[_region_to_wire(region, index) for region in regions],
        nixl_metadata=handshake.nixl_metadata,
        direct=handshake.direct,
        start=handshake.start,
    )
    raw_body = msgspec.msgpack.encode(body)
    _decode(_Body, raw_body, "handshake")  # limits hold for the sender too
    envelope = _Envelope(version=WIRE_VERSION, body=msgspec.Raw(raw_body))
    return _bounded(msgspec.msgpack.encode(envelope), "handshake")


def decode(blob: bytes) -> Handshake | None:
    """Read a peer's map; None when it is well formed and does not carry our key (an untagged peer).

    Raises:
        WireVersionError: the peer speaks another wire version.
        WireError: anything else that is wrong, with ``code`` and ``field``.
    """
    carrier = _decode(_Carrier, _bounded(blob, "handshake"), "handshake")
    return None if carrier.kvpd is None else decode_tag(carrier.kvpd)


def decode_tag(tag: bytes) -> Handshake:
    """Read the value under our key, for carriers that decode the outer map themselves.

    Raises:
        WireVersionError, WireError: as `decode`.
    """
    envelope = _decode(_Envelope, _bounded(tag, "kvpd"), "kvpd")
    if envelope.version != WIRE_VERSION:
        raise WireVersionError(
            f"the peer speaks kvpd wire version {envelope.version}, this is {WIRE_VERSION}; "
            "run the same kvpd release on both sides",
            code="wire-version",
            field="version",
            got=envelope.version,
            expected=WIRE_VERSION,
        )
    body = _decode(_Body, bytes(envelope.body), "kvpd.body")
    # A format is proved element by element: what a message can ask for is bounded as a whole.
    proof_bytes = 0
    for at, format in enumerate(body.formats):
        proof_bytes += sum(format.plane_bytes)
        if proof_bytes > MAX_FORMAT_BYTES:
            raise _error(
                "too-many-format-bytes",
                f"formats[{at}].plane_bytes",
                str(proof_bytes),
                f"at most {MAX_FORMAT_BYTES} up to here",
            )
    formats = [_format_from_wire(format, at) for at, format in enumerate(body.formats)]
    regions = [_region_from_wire(region, formats, at) for at, region in enumerate(body.regions)]
    with _Named("facts"):
        facts = EngineFacts(**msgspec.structs.asdict(body.facts))
    with _Named("regions"):
        description = EngineDescription(facts, regions)
    return Handshake(body.engine_id, description, body.nixl_metadata, body.direct, body.start)


def _format_to_wire(format: PageFormat) -> _Format:
    return _Format(
        family=format.family,
        digest=format.digest,
        components=[_copy(_Component, component) for component in format.components],
        plane_bytes=list(format.plane_bytes),
        padding=[_copy(_Span, span) for span in format.padding],
    )


def _format_from_wire(wire: _Format, at: int) -> PageFormat:
    with _Named(f"formats[{at}]"):
        format = PageFormat.from_components(
            wire.family,
            [Component(**msgspec.structs.asdict(component)) for component in wire.components],
            wire.plane_bytes,
            [PlaneSpan(**msgspec.structs.asdict(span)) for span in wire.padding],
        )
    # The digest is what verdicts compare: believed unread, a peer could pass one map for another.
    if format.digest != wire.digest:
        raise _error("digest", f"formats[{at}].digest", wire.digest, format.digest)
    return format


def _region_to_wire(region: Region, index: dict[PageFormat, int]) -> _Region:
    return _Region(
        address=region.address,
        num_blocks=region.num_blocks,
        block_bytes=region.block_bytes,
        block_stride_bytes=region.block_stride_bytes,
        extent_bytes=region.extent_bytes,
        memory=region.memory,
        device=region.device,
        format=None if region.format is None else index[region.format],
        planes=[_copy(_Span, span) for span in region.planes],
        layers=list(region.layers),
    )


def _region_from_wire(wire: _Region, formats: list[PageFormat], at: int) -> Region:
    if wire.format is not None and wire.format >= len(formats):
        raise _error(
            "format-index", f"regions[{at}].format", str(wire.format), f"below {len(formats)}"
        )
    with _Named(f"regions[{at}]"):
        return Region(
            wire.address,
            wire.num_blocks,
            wire.block_bytes,
            wire.block_stride_bytes,
            format=None if wire.format is None else formats[wire.format],
            planes=[PlaneSpan(**msgspec.structs.asdict(span)) for span in wire.planes],
            layers=wire.layers,
            memory=wire.memory,
            device=wire.device,
            extent_bytes=wire.extent_bytes,
        )


class _Named:
    """Turn a core error inside the block into a `WireError` that says which part of the wire."""

    def __init__(self, field: str) -> None:
        self._field = field

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, KvpdError):
            field = f"{self._field}.{error.field}" if error.field else self._field
            raise WireError(
                f"{field}: {error}",
                code=error.code,
                field=field,
                got=error.got,
                expected=error.expected,
            ) from error
        # A number that the core's own integer types cannot hold.
        if isinstance(error, OverflowError):
            raise _error("integer-range", self._field, "too large", "one that fits") from error


_T = TypeVar("_T")
_Struct = TypeVar("_Struct", bound=msgspec.Struct)


def _copy(wire: type[_Struct], core: object) -> _Struct:
    """A wire struct from the core object that has the same attributes."""
    names = msgspec.structs.fields(wire)
    return wire(**{field.name: getattr(core, field.name) for field in names})


def _decode(kind: type[_T], blob: bytes, field: str) -> _T:
    try:
        return msgspec.msgpack.decode(blob, type=kind)  # refuses truncated and trailing bytes
    except msgspec.ValidationError as error:
        # msgspec ends its message with "- at `$.path`"; the path is the only structured part.
        _, _, path = str(error).partition(" - at `$")
        where = f"{field}{path.removesuffix('`')}"
        raise WireError(f"{where}: {error}", code="invalid-field", field=where) from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise WireError(f"{field}: {error}", code="malformed", field=field) from error


def _bounded(blob: bytes, field: str) -> bytes:
    if len(blob) > MAX_BYTES:
        raise _error("oversized", field, f"{len(blob)} bytes", f"at most {MAX_BYTES}")
    return blob


def _error(code: str, field: str, got: str, expected: str) -> WireError:
    return WireError(
        f"{field}: {code}: got {got}, expected {expected}",
        code=code,
        field=field,
        got=got,
        expected=expected,
    )
