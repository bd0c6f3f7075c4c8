"""Text for people: colours on terminals only, not with NO_COLOR, and a peer's text escaped."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvpd.cli.printable import printable

_WIDTH = 1000


class _Console(Console):
    def on_broken_pipe(self) -> None:
        # rich would end the program with status 1, which here means a refused pair.
        raise BrokenPipeError


class Page:
    """Lines and tables on standard output."""

    def __init__(self) -> None:
        # As wide as it takes: a table cut to the width of a pipe cannot be read or searched.
        self._console = _Console(
            highlight=False, markup=False, emoji=False, soft_wrap=True, width=_WIDTH
        )

    def line(self, text: str = "", style: str = "") -> None:
        """One line."""
        self._console.print(Text(printable(text), style=style))

    def heading(self, text: str) -> None:
        """A blank line and a title."""
        self.line()
        self.line(text, "bold")

    def pairs(self, rows: list[tuple[str, str]]) -> None:
        """Names and values, aligned."""
        width = max((len(name) for name, _ in rows), default=0)
        for name, value in rows:
            text = Text("  ").append(f"{name:<{width}}", "dim").append(f"  {printable(value)}")
            self._console.print(text)

    def cells(self, start: str, cells: list[tuple[str, str]]) -> None:
        """One line of texts, each with a style."""
        line = Text(start)
        for text, style in cells:
            line.append("  ").append(printable(text), style)
        self._console.print(line)

    def table(self, columns: list[str], rows: list[list[str]], *, right: int = 0) -> None:
        """Rows under a header; the last `right` columns are aligned to the right."""
        table = Table(box=None, pad_edge=False, padding=(0, 2))
        for index, name in enumerate(columns):
            is_right = index >= len(columns) - right
            table.add_column(
                Text(name, "dim"), justify="right" if is_right else "left", no_wrap=True
            )
        for row in rows:
            table.add_row(*(Text(printable(cell)) for cell in row))
        self._console.print(table)


def counted(number: int, noun: str) -> str:
    """ "1 layer", "36 layers"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def readable_bytes(number: int) -> str:
    """Bytes in the unit that suits them; powers of 1024, as memory is counted."""
    value, unit = float(number), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{number} B" if unit == "B" else f"{value:.4g} {unit}"
