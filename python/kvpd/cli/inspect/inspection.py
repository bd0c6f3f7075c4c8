"""What ``kvpd inspect`` found out: the values it prints, saves, and reads again.

An `Inspection` is the documented JSON (docs/schemas/inspect.json). `summary` is derived from the
rest and is not read again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

import msgspec

from kvpd.cli.inspect.fits import Fit, fits
from kvpd.cli.inspect.optional_parts import REQUIRED_PARTS, close_tag, open_tag
from kvpd.cli.inspect.regions import RegionGroup, groups_of, total_bytes
from kvpd.errors import KvpdError, WireError
from kvpd.vllm.published import AgentMetadata, Published, StockMetadata
from kvpd.wire import Handshake

_KIND: Literal["kvpd-inspection"] = "kvpd-inspection"
_MAX_FILE_BYTES = 64 << 20


class TagProblem(msgspec.Struct, frozen=True):
    """Why a tag could not be read."""

    code: str
    message: str


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """What follows from the handshake.

    Attributes:
        connector: whose connector answered.
        num_layers: layers that have regions.
        total_bytes: registered memory.
        regions: regions, layers that are alike folded.
        fits: of an untagged engine, every known page format its geometry would fit.
        page_format: of a tagged one, the format that all layers share.
        optional_parts: parts of the tag that this release does not judge by.
        left_out: parts that hold bytes or handles and are neither shown nor saved.
        tag_problem: why the tag could not be read.
    """

    connector: Literal["kvpd", "stock"]
    num_layers: int
    total_bytes: int
    regions: list[RegionGroup]
    fits: list[Fit] = []
    page_format: str | None = None
    optional_parts: dict[str, Any] = {}
    left_out: list[str] = []
    tag_problem: TagProblem | None = None


class Inspection(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of an engine.

    Attributes:
        kind, schema_version: what this is.
        source: the address that was asked.
        tp_rank: the tensor-parallel rank that was asked for.
        compatibility_hash: stock's digest, as published.
        metadata: stock's metadata without NIXL's part.
        tag: kvpd's tag, decoded; None for an untagged engine.
        summary: derived.
    """

    kind: Literal["kvpd-inspection"]
    schema_version: Literal[1]
    source: str
    tp_rank: Annotated[int, msgspec.Meta(ge=0)]
    compatibility_hash: str
    metadata: StockMetadata
    tag: dict[str, Any] | None
    summary: Summary

    @classmethod
    def of(cls, published: Published, source: str, tp_rank: int) -> Self:
        """Everything that may be shown of a handshake."""
        tag: dict[str, Any] | None = None
        left_out: tuple[str, ...] = ()
        problem: TagProblem | None = None
        handshake: Handshake | None = None
        try:
            handshake = published.handshake()
        except KvpdError as error:
            problem = TagProblem(error.code, str(error))
        if published.metadata.kvpd is not None:
            try:
                tag, left_out = open_tag(published.metadata.kvpd)
            except ValueError:
                tag = {}
        metadata = StockMetadata(**_stock_fields(published.metadata))
        groups = groups_of(metadata, handshake)
        format = None if handshake is None else handshake.description.format
        body = (tag or {}).get("body")
        parts = body if isinstance(body, dict) and problem is None else {}
        summary = Summary(
            connector="stock" if published.metadata.kvpd is None else "kvpd",
            num_layers=len({layer for group in groups for layer in group.layers}),
            total_bytes=total_bytes(metadata),
            regions=groups,
            fits=fits(metadata) if handshake is None else [],
            page_format=None if format is None else format.name,
            optional_parts={n: value for n, value in parts.items() if n not in REQUIRED_PARTS},
            left_out=[path for path in left_out if path != "body.nixl_metadata"],
            tag_problem=problem,
        )
        return cls(
            kind=_KIND,
            schema_version=1,
            source=source,
            tp_rank=tp_rank,
            compatibility_hash=published.digest,
            metadata=metadata,
            tag=tag,
            summary=summary,
        )

    def published(self) -> Published:
        """The handshake again.

        Raises:
            WireError: the tag has values that no tag has.
        """
        try:
            tag = None if self.tag is None else close_tag(self.tag)
        except ValueError as error:
            raise WireError(f"tag: {error}", code="malformed", field="tag") from error
        metadata = AgentMetadata(**_stock_fields(self.metadata), kvpd=tag)
        return Published(self.compatibility_hash, metadata)

    def to_json(self) -> bytes:
        """As text, with a final newline."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"


def _stock_fields(metadata: StockMetadata) -> dict[str, Any]:
    names = (field.name for field in msgspec.structs.fields(StockMetadata))
    return {name: getattr(metadata, name) for name in names}


def load(path: Path) -> Inspection:
    """Read a saved inspection.

    Raises:
        KvpdError: the file cannot be read, or is none.
    """
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise WireError(f"{path}: larger than any inspection", code="oversized", field="file")
        return msgspec.json.decode(path.read_bytes(), type=Inspection)
    except OSError as error:
        raise KvpdError(
            f"{path}: {error.strerror}; expected HOST:PORT or a file of `kvpd inspect --save`",
            code="unreadable",
            field="file",
            got=error.strerror,
            expected="an inspection",
        ) from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise WireError(
            f"{path} is not a file of `kvpd inspect --save`: {error}",
            code="invalid-file",
            field="file",
            got=str(error),
            expected="an inspection",
        ) from error
