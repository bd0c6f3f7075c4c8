"""Pages cut into the 16-byte pieces that kernels load and store: what a piece holds, what stays."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvpd.cli.formats.drawing import DrawnFormat, Element

Piece = tuple[Element | None, ...]


def pieces_of(plane: Sequence[Element | None], piece_elements: int) -> list[Piece]:
    """The pieces of a plane, in memory order."""
    return [tuple(plane[at : at + piece_elements]) for at in range(0, len(plane), piece_elements)]


def label(piece: Piece) -> str:
    """What a piece holds, e.g. "K h0 n5 d8-15"."""
    elements = [element for element in piece if element is not None]
    if not elements:
        return "padding"
    names = ",".join(dict.fromkeys(element.component.upper() for element in elements))
    return (
        f"{names} h{_range(e.head for e in elements)} n{_range(e.token for e in elements)} "
        f"d{_range(e.channel for e in elements)}"
    )


@dataclass(frozen=True)
class Fate:
    """What becomes of one component's pieces from one format to another.

    Attributes:
        num_whole: pieces of the source that are pieces of the target too.
        num_pieces: pieces of the source.
        spread: over how many pieces of the target the first one is spread.
    """

    num_whole: int
    num_pieces: int
    spread: int


def fate(source: DrawnFormat, target: DrawnFormat, component: str, piece_elements: int) -> Fate:
    """Follow every piece of a component."""
    own = [
        piece
        for plane in source.planes
        for piece in pieces_of(plane, piece_elements)
        if any(element is not None and element.component == component for element in piece)
    ]
    theirs = [piece for plane in target.planes for piece in pieces_of(plane, piece_elements)]
    of_element = {element: at for at, piece in enumerate(theirs) for element in piece}
    whole = set(theirs)
    return Fate(
        num_whole=sum(piece in whole for piece in own),
        num_pieces=len(own),
        spread=len({of_element[element] for element in own[0]}) if own else 0,
    )


def _range(values: Iterable[int]) -> str:
    distinct = sorted(set(values))
    return str(distinct[0]) if len(distinct) == 1 else f"{distinct[0]}-{distinct[-1]}"
