"""Pages as text: memory in rows of 16-byte pieces, and what becomes of the pieces."""

from __future__ import annotations

import itertools

from kvpd.cli.console import Page, counted
from kvpd.cli.formats.drawing import PIECE_BYTES, Drawing, DrawnFormat, Element
from kvpd.cli.formats.pieces import Piece, fate, label, pieces_of

_PIECES_A_ROW = 4
_MAX_BREAKS = 3
_STYLES = {"k": "cyan", "v": "yellow"}


def show(drawing: Drawing, page: Page) -> None:
    """Print every format, then the element that is followed, then what a conversion does."""
    page.line(
        f"A page of {counted(drawing.heads, 'head')} (h), {counted(drawing.tokens, 'token')} (n), "
        f"{counted(drawing.head_dim, 'channel')} (d), {drawing.dtype}; "
        f"x = {drawing.piece_elements} elements in {PIECE_BYTES} bytes."
    )
    for format in drawing.formats:
        _show_format(format, drawing, page)
    page.heading(f"where {drawing.element} lies")
    page.pairs(
        [
            (
                format.name,
                f"plane {format.followed.plane}, byte {format.followed.byte:,}, "
                f"element {format.followed.number:,}",
            )
            for format in drawing.formats
        ]
    )
    first, *others = drawing.formats
    for other in others:
        _show_fate(first, other, drawing, page)


def _show_format(format: DrawnFormat, drawing: Drawing, page: Page) -> None:
    page.heading(format.page_format)
    page.pairs([("K", format.k), ("V", format.v)])
    for number, plane in enumerate(format.planes):
        page.line(
            f"  plane {number}, {len(plane) * drawing.element_bytes:,} bytes; "
            f"from byte, {PIECE_BYTES} bytes each:"
        )
        pieces = pieces_of(plane, drawing.piece_elements)
        rows = [pieces[at : at + _PIECES_A_ROW] for at in range(0, len(pieces), _PIECES_A_ROW)]
        width = max(len(label(piece)) for piece in pieces)
        previous = -1
        for at in _telling_rows(rows):
            if at != previous + 1:
                page.line("           ...")
            cells = [(f"{label(piece):<{width}}", _style(piece)) for piece in rows[at]]
            page.cells(f"  {at * _PIECES_A_ROW * PIECE_BYTES:>8,} ", cells)
            previous = at


def _telling_rows(rows: list[list[Piece]]) -> list[int]:
    """The first rows, those where something else changes than usual, and the last one."""
    starts = [next((element for element in row[0] if element is not None), None) for row in rows]
    changes = [_changed(a, b) for a, b in itertools.pairwise(starts)]
    breaks = [at + 1 for at, change in enumerate(changes) if change != changes[0]]
    wanted = {0, 1, *breaks[:_MAX_BREAKS], len(rows) - 1}
    return sorted(at for at in wanted if at < len(rows))


def _changed(a: Element | None, b: Element | None) -> tuple[bool, ...]:
    if a is None or b is None:
        return ()
    return (
        a.component != b.component,
        a.head != b.head,
        a.token != b.token,
        a.channel != b.channel,
    )


def _style(piece: Piece) -> str:
    components = {element.component for element in piece if element is not None}
    return _STYLES.get(components.pop(), "") if len(components) == 1 else ""


def _show_fate(source: DrawnFormat, target: DrawnFormat, drawing: Drawing, page: Page) -> None:
    page.heading(f"from {source.name} to {target.name}")
    rows = []
    for component in ("k", "v"):
        found = fate(source, target, component, drawing.piece_elements)
        text = f"{found.num_whole} of {found.num_pieces} {PIECE_BYTES}-byte pieces stay whole"
        if found.num_whole < found.num_pieces:
            text += f"; the first is spread over {found.spread}"
        rows.append((component.upper(), text))
    page.pairs(rows)
