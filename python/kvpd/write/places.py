"""Where K and V of a layer begin: an address and two strides each, from its pages' pieces."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from kvpd.convert.axes import VECTOR_BYTES
from kvpd.errors import WriteError
from kvpd.write.plan import key_and_value

if TYPE_CHECKING:
    import torch

    from kvpd._kvpd import Component, PageFormat
    from kvpd.convert import Pages


@dataclass(frozen=True)
class Place:
    """Head h of block b begins at ``address + b*block_stride_bytes + h*head_stride_bytes``."""

    address: int
    block_stride_bytes: int
    head_stride_bytes: int


def places_of(pages: Pages, layer: int) -> tuple[Place, Place]:
    """(K's, V's) of a layer.

    Raises:
        WriteError: a head that is cut into pieces, heads that are not equally far apart, or
            addresses that 16-byte stores cannot reach.
    """
    key, value = key_and_value(pages.format)
    return _place(pages, layer, key), _place(pages, layer, value)


def _place(pages: Pages, layer: int, component: Component) -> Place:
    pieces = pages.layers[layer]
    head_bytes = _extent_bytes(component)
    start = page_start_bytes(pages.format, component)
    addresses: list[int] = []
    strides: set[int] = set()
    for head in range(component.heads):
        first = start + head * component.head_stride_bytes
        found = _piece_of(pieces, first, first + head_bytes)
        if found is None:
            raise WriteError(
                f"{component.name} of head {head} is bytes [{first}, {first + head_bytes}) of a "
                f"page, which no one of its {len(pieces)} pieces holds",
                code="cut-head",
                field="pages",
                got=[piece.shape[1] for piece in pieces],
                expected="pieces of whole heads",
            )
        piece, offset = found
        addresses.append(piece.data_ptr() + offset)
        strides.add(piece.stride(0))
    steps = {b - a for a, b in pairwise(addresses)}
    if len(steps) > 1 or len(strides) > 1:
        raise WriteError(
            f"{component.name}: heads lie {sorted(steps)} bytes apart, blocks {sorted(strides)}",
            code="uneven-heads",
            field="pages",
            got=sorted(steps),
            expected="one distance",
        )
    place = Place(addresses[0], strides.pop(), steps.pop() if steps else 0)
    for name, number in vars(place).items():
        if number % VECTOR_BYTES:
            raise WriteError(
                f"{component.name}: {name} is {number}, no multiple of {VECTOR_BYTES}",
                code="unaligned",
                field=f"{component.name}.{name}",
                got=number,
                expected=f"a multiple of {VECTOR_BYTES}",
            )
    return place


def page_start_bytes(format: PageFormat, component: Component) -> int:
    """The byte of the page where a component's first element lies."""
    starts = list(accumulate(format.plane_bytes, initial=0))
    return starts[component.plane] + component.base_bytes


def _extent_bytes(component: Component) -> int:
    """Bytes from a head's first element to behind its last one."""
    axes = (
        (component.tokens // component.token_tile, component.token_tile_stride_bytes),
        (component.token_tile, component.token_stride_bytes),
        (component.channels // component.channel_tile, component.channel_tile_stride_bytes),
        (component.channel_tile, component.channel_stride_bytes),
    )
    return sum((extent - 1) * stride for extent, stride in axes) + component.element_bytes


def _piece_of(
    pieces: tuple[torch.Tensor, ...], first: int, end: int
) -> tuple[torch.Tensor, int] | None:
    start = 0
    for piece in pieces:
        if start <= first and end <= start + piece.shape[1]:
            return piece, first - start
        start += piece.shape[1]
    return None
