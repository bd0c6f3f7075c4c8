"""The cheat sheet of known page formats, for people and as JSON (docs/schemas/formats.json)."""

from __future__ import annotations

from typing import Literal

import msgspec

from kvpd.cli.console import Page
from kvpd.cli.formats.known import KNOWN


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One format; `k` and `v` are tensors in memory, outermost axis first."""

    name: str
    planes: int
    k: str
    v: str
    stored: str
    backends: str


class Sheet(msgspec.Struct, frozen=True, kw_only=True):
    """All known formats."""

    kind: Literal["kvpd-formats"] = "kvpd-formats"
    schema_version: Literal[1] = 1
    formats: list[Row]


def rows() -> list[Row]:
    """A row per known format; the number of planes is the core's."""
    return [
        Row(
            name=known.name,
            planes=len(known.format(2, 16, 64, "bfloat16").plane_bytes),
            k=known.k,
            v=known.v,
            stored=known.stored,
            backends=known.backends,
        )
        for known in KNOWN
    ]


def to_json() -> bytes:
    """As text, with a final newline."""
    return msgspec.json.format(msgspec.json.encode(Sheet(formats=rows())), indent=2) + b"\n"


def show(page: Page) -> None:
    """Print the sheet."""
    page.line("A page is one block of one layer on one rank: K and V, each of [H, N, D].", "bold")
    page.line()
    page.table(
        ["name", "planes", "K in memory", "V in memory"],
        [[row.name, str(row.planes), row.k, row.v] for row in rows()],
    )
    page.line()
    for row in rows():
        page.line(row.name, "bold")
        page.pairs([("stored", row.stored), ("kept by", row.backends)])
    page.line()
    page.line("H heads of the rank, N tokens of a block, D channels, x = 16 / element bytes.")
    page.line("See one: kvpd formats show standard aiter-shuffle")
