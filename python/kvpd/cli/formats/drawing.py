"""Pages as lists of elements in memory order. Every place is `PageFormat.offset`'s answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from kvpd._kvpd import PageFormat
from kvpd.cli.formats.known import BY_NAME
from kvpd.errors import FormatError

MAX_ELEMENTS = 1 << 16
PIECE_BYTES = 16


class Element(msgspec.Struct, frozen=True, array_like=True):
    """One element of K or of V."""

    component: str
    head: int
    token: int
    channel: int

    def __str__(self) -> str:
        return f"{self.component.upper()}(h={self.head}, n={self.token}, d={self.channel})"


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where an element lies: byte and element number in its plane."""

    plane: int
    byte: int
    number: int


class DrawnFormat(msgspec.Struct, frozen=True, kw_only=True):
    """A page of one format.

    Attributes:
        name: on the command line. page_format: as the core names it. digest: of the map.
        k, v: as tensors in memory, outermost axis first.
        planes: per plane its elements in memory order; None is padding.
        followed: where the element that is followed lies.
    """

    name: str
    page_format: str
    digest: str
    k: str
    v: str
    planes: list[list[Element | None]]
    followed: Place


class Drawing(msgspec.Struct, frozen=True, kw_only=True):
    """Pages of one shape in several formats (docs/schemas/formats-show.json).

    Attributes:
        piece_elements: elements of a 16-byte piece, AITER's x.
        element: the element that is followed.
    """

    kind: Literal["kvpd-formats-show"] = "kvpd-formats-show"
    schema_version: Literal[1] = 1
    heads: int
    tokens: int
    head_dim: int
    dtype: str
    element_bytes: int
    piece_elements: int
    element: Element
    formats: list[DrawnFormat]

    def to_json(self) -> bytes:
        """As text, with a final newline."""
        return msgspec.json.encode(self) + b"\n"


def drawing_of(
    names: Sequence[str],
    heads: int,
    tokens: int,
    head_dim: int,
    dtype: str,
    element: tuple[str, int, int, int] | None,
) -> Drawing:
    """Place every element of a page in every format.

    Args:
        element: (component, head, token, channel) to follow; None chooses one off all axes.

    Raises:
        FormatError: no such page can be, it has too many elements to draw, or no such element.
    """
    num_elements = 2 * heads * tokens * head_dim
    if num_elements > MAX_ELEMENTS:
        raise FormatError(
            f"a page of {num_elements} elements is too large to draw, {MAX_ELEMENTS} are the "
            "limit; a smaller one shows the same pattern",
            code="too-many-elements",
            field="heads",
            got=num_elements,
            expected=f"at most {MAX_ELEMENTS}",
        )
    formats = {name: BY_NAME[name].format(heads, tokens, head_dim, dtype) for name in names}
    element_bytes = next(iter(formats.values())).components[0].element_bytes
    chosen = element or ("k", min(1, heads - 1), min(5, tokens - 1), min(9, head_dim - 1))
    return Drawing(
        heads=heads,
        tokens=tokens,
        head_dim=head_dim,
        dtype=dtype,
        element_bytes=element_bytes,
        piece_elements=PIECE_BYTES // element_bytes,
        element=Element(*chosen),
        formats=[_drawn(name, format, Element(*chosen)) for name, format in formats.items()],
    )


def _drawn(name: str, format: PageFormat, followed: Element) -> DrawnFormat:
    size = format.components[0].element_bytes
    planes: list[list[Element | None]] = [
        [None] * (plane_bytes // size) for plane_bytes in format.plane_bytes
    ]
    for component in format.components:
        for head in range(component.heads):
            for token in range(component.tokens):
                for channel in range(component.channels):
                    plane, byte = format.offset(component.name, head, token, channel)
                    element = Element(component.name, head, token, channel)
                    planes[plane][byte // size] = element
    plane, byte = format.offset(followed.component, followed.head, followed.token, followed.channel)
    return DrawnFormat(
        name=name,
        page_format=format.name,
        digest=format.digest,
        k=BY_NAME[name].k,
        v=BY_NAME[name].v,
        planes=planes,
        followed=Place(plane=plane, byte=byte, number=byte // size),
    )
