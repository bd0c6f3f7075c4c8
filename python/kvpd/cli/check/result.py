"""The documented JSON of ``kvpd check`` (docs/schemas/check.json)."""

from __future__ import annotations

from typing import Literal

import msgspec

from kvpd.cli.check.cost import Cost
from kvpd.cli.check.outcome import Answer, Assumed, Finding, Outcome, Status
from kvpd.cli.inspect.engine import Engine

EXIT_STATUS: dict[Status, int] = {"works": 0, "refused": 1, "unknown": 2}


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """One engine of the pair."""

    source: str
    tp_rank: int
    engine_id: str
    connector: Literal["kvpd", "stock"]
    page_format: str | None
    layout: str
    backend: str
    block_size: int


class Conversion(msgspec.Struct, frozen=True, kw_only=True):
    """What is read and what is kept."""

    source: str
    target: str


class CheckResult(msgspec.Struct, frozen=True, kw_only=True):
    """The answer about a pair.

    Attributes:
        kind, schema_version: what this is.
        status: whether the pair works; the exit status is 0, 1 or 2.
        handshake: what the decoder will answer. Accepted and status unknown: some is unproved.
        decided_by: whose connector the decoder runs.
        prefill, decode: the pair.
        assumed: configuration of the decoder that it does not publish.
        verdict: of the page formats; null where a stock decoder decides, or the pair is refused.
        conversion: what is converted; null if nothing is.
        reasons: why it is refused.
        doubts: what the decoder's answer depends on and was not published.
        unproved: what right tokens depend on and was not published.
        warnings: what makes the pair slow.
        would_convert: refused, and converted with conversion enabled on the decoder.
        cost: of an accepted pair, where a side is tagged.
    """

    kind: Literal["kvpd-check"] = "kvpd-check"
    schema_version: Literal[1] = 1
    status: Status
    handshake: Answer
    decided_by: Literal["kvpd", "stock"]
    prefill: Side
    decode: Side
    assumed: Assumed
    verdict: Literal["identical", "convert"] | None
    conversion: Conversion | None
    reasons: list[Finding]
    doubts: list[Finding]
    unproved: list[Finding]
    warnings: list[Finding]
    would_convert: bool
    cost: Cost | None

    def to_json(self) -> bytes:
        """As text, with a final newline."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"


def result_of(
    prefill: Engine, decode: Engine, assumed: Assumed, outcome: Outcome, cost: Cost | None
) -> CheckResult:
    """Everything that is printed."""
    verdict = outcome.verdict
    conversion = None
    if verdict is not None and verdict.source is not None and verdict.target is not None:
        conversion = Conversion(source=verdict.source.name, target=verdict.target.name)
    return CheckResult(
        status=outcome.status,
        handshake=outcome.handshake,
        decided_by=outcome.decided_by,
        prefill=_side(prefill),
        decode=_side(decode),
        assumed=assumed,
        verdict=None if verdict is None or verdict.kind == "refuse" else verdict.kind,
        conversion=conversion,
        reasons=outcome.reasons,
        doubts=outcome.doubts,
        unproved=outcome.unproved,
        warnings=outcome.warnings,
        would_convert=outcome.would_convert,
        cost=cost,
    )


def _side(engine: Engine) -> Side:
    metadata = engine.published.metadata
    format = None if engine.tag is None else engine.tag.description.format
    return Side(
        source=engine.source,
        tp_rank=engine.tp_rank,
        engine_id=metadata.engine_id,
        connector="stock" if metadata.kvpd is None else "kvpd",
        page_format=None if format is None else format.name,
        layout=metadata.kv_cache_layout,
        backend=metadata.attn_backend_name,
        block_size=metadata.block_size,
    )
