"""Pages as a picture: every element in memory order, one tile marked in all formats.

The marked tile is x tokens by x channels of the first head, x elements being 16 bytes: what a
conversion transposes, or moves whole.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvpd.cli.formats.drawing import Drawing, DrawnFormat, Element

_CELL_WIDTH, _CELL_HEIGHT = 34, 20
_LEFT, _TOP, _GAP = 70, 40, 26
_PIECES_A_ROW = 4
# Component -> fill, fill of the marked tile. Told apart by lightness too, not by hue alone.
_FILLS = {"k": ("#deebf7", "#4292c6"), "v": ("#fee6ce", "#f16913")}
_PADDING = "#f0f0f0"
_STYLE = (
    "text{font-family:ui-monospace,monospace;font-size:9px;fill:#222}"
    ".title{font-size:15px;font-weight:bold}.note{font-size:12px}"
    ".marked{fill:#fff}rect{stroke:#fff}.followed{stroke:#000;stroke-width:2.5;fill:none}"
)


def svg_of(drawing: Drawing) -> str:
    """The picture as an SVG document, formats one below the other."""
    columns = _PIECES_A_ROW * drawing.piece_elements
    body: list[str] = []
    y = _TOP
    for format in drawing.formats:
        lines, y = _format(format, drawing, columns, y)
        body += lines
    width = _LEFT + columns * _CELL_WIDTH + _LEFT
    x = drawing.piece_elements
    note = (
        f"cells are elements in memory order, token,channel inside; blue K, orange V; dark: tokens "
        f"0-{x - 1} by channels 0-{x - 1} of head 0; outlined: {drawing.element}"
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{y}" '
            f'viewBox="0 0 {width} {y}" role="img">',
            f"<style>{_STYLE}</style>",
            f'<rect width="{width}" height="{y}" fill="#fff"/>',
            f'<text class="note" x="{_LEFT}" y="20">{note}</text>',
            *body,
            "</svg>",
            "",
        ]
    )


def _format(format: DrawnFormat, drawing: Drawing, columns: int, y: int) -> tuple[list[str], int]:
    lines = [
        f'<text class="title" x="{_LEFT}" y="{y + 12}">{format.page_format}</text>',
        f'<text class="note" x="{_LEFT}" y="{y + 28}">K {format.k}; V {format.v}</text>',
    ]
    y += 36
    for number, plane in enumerate(format.planes):
        lines.append(f'<text class="note" x="4" y="{y + 14}">plane {number}</text>')
        y += 20
        lines += _cells(plane, drawing, columns, y)
        y += -(-len(plane) // columns) * _CELL_HEIGHT + _GAP
    return lines, y


def _cells(plane: list[Element | None], drawing: Drawing, columns: int, top: int) -> Iterator[str]:
    size = f'width="{_CELL_WIDTH}" height="{_CELL_HEIGHT}"'
    outline = ""
    for at, element in enumerate(plane):
        row, column = divmod(at, columns)
        x, y = _LEFT + column * _CELL_WIDTH, top + row * _CELL_HEIGHT
        if column == 0:
            yield f'<text x="4" y="{y + 13}">{at:,}</text>'
        title = f"element {at}, byte {at * drawing.element_bytes}: {element or 'padding'}"
        yield (
            f'<rect x="{x}" y="{y}" {size} fill="{_fill(element, drawing)}">'
            f"<title>{title}</title></rect>"
        )
        if element is None:
            continue
        css = ' class="marked"' if _is_marked(element, drawing) else ""
        yield (
            f'<text{css} x="{x + 3}" y="{y + 13}" pointer-events="none">'
            f"{element.token},{element.channel}</text>"
        )
        if element == drawing.element:
            outline = f'<rect class="followed" x="{x}" y="{y}" {size} pointer-events="none"/>'
    # Last, or the next cells would cover it.
    yield outline


def _fill(element: Element | None, drawing: Drawing) -> str:
    if element is None:
        return _PADDING
    return _FILLS.get(element.component, (_PADDING, _PADDING))[_is_marked(element, drawing)]


def _is_marked(element: Element, drawing: Drawing) -> bool:
    size = drawing.piece_elements
    return element.head == 0 and element.token < size and element.channel < size
