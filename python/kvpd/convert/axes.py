"""The axes a permutation moves: both components split into sub-axes with one stride per side."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

from kvpd.convert.components import Placed
from kvpd.errors import ConversionError

if TYPE_CHECKING:
    from kvpd._kvpd import Component

VECTOR_BYTES = 16

Name = Literal["head", "token", "channel"]
Side = Literal["source", "target"]


@dataclass(frozen=True)
class Axis:
    """Steps of one coordinate, `extent` of them, at a fixed distance on either side."""

    name: Name
    extent: int
    source_stride_bytes: int
    target_stride_bytes: int

    def stride_bytes(self, side: Side) -> int:
        """The distance of two steps on one side."""
        return self.source_stride_bytes if side == "source" else self.target_stride_bytes


def common_axes(source: Placed, target: Placed) -> tuple[Axis, ...]:
    """Axes in which both sides are affine, the innermost of each side exactly one vector long.

    Token and channel are split where either side changes its stride, and once more so that the
    contiguous run of each side is a 16-byte vector. Extents of the returned axes are > 1, in no
    particular order.

    Raises:
        ConversionError: tiles that do not nest, or a side whose contiguous run is under 16 bytes or
            not aligned to 16.
    """
    a, b = source.component, target.component
    element_bytes = a.element_bytes
    num_vector = VECTOR_BYTES // element_bytes
    breaks = {
        "token": {a.token_tile, b.token_tile},
        "channel": {a.channel_tile, b.channel_tile},
    }
    for component in (a, b):
        breaks[_contiguous(component)].add(num_vector)
    axes = [Axis("head", a.heads, a.head_stride_bytes, b.head_stride_bytes)]
    axes += _split("token", a.tokens, sorted(breaks["token"]), a, b)
    axes += _split("channel", a.channels, sorted(breaks["channel"]), a, b)
    axes = [axis for axis in axes if axis.extent > 1]
    _check_vectors(axes, "source", source)
    _check_vectors(axes, "target", target)
    return tuple(axes)


def in_order(axes: tuple[Axis, ...], side: Side) -> tuple[Axis, ...]:
    """Axes from the outermost to the contiguous one of a side."""
    return tuple(sorted(axes, key=lambda axis: -axis.stride_bytes(side)))


def _contiguous(component: Component) -> Literal["token", "channel"]:
    by_channel = _stride(component, "channel", 1) == component.element_bytes
    return "channel" if by_channel and component.channels > 1 else "token"


def _split(
    name: Literal["token", "channel"],
    extent: int,
    breaks: list[int],
    a: Component,
    b: Component,
) -> list[Axis]:
    bounds = [1, *(step for step in breaks if 1 < step < extent), extent]
    axes = []
    for low, high in pairwise(bounds):
        if high % low:
            raise ConversionError(
                f"{a.name}: {name}s are split at {low} and at {high}, which do not nest",
                code="tiles-do-not-nest",
                field=f"{a.name}.{name}_tile",
                got=low,
                expected=f"a divisor of {high}",
            )
        axes.append(Axis(name, high // low, _stride(a, name, low), _stride(b, name, low)))
    return axes


def _stride(component: Component, name: Literal["token", "channel"], step: int) -> int:
    """Bytes from coordinate c to c + `step`, for a step inside a tile or of whole tiles."""
    tile: int = getattr(component, f"{name}_tile")
    if step < tile:
        inner: int = getattr(component, f"{name}_stride_bytes")
        return step * inner
    outer: int = getattr(component, f"{name}_tile_stride_bytes")
    return (step // tile) * outer


def _check_vectors(axes: list[Axis], side: Side, placed: Placed) -> None:
    component = placed.component
    num_vector = VECTOR_BYTES // component.element_bytes
    inner = min(axes, key=lambda axis: axis.stride_bytes(side))
    run_bytes = inner.extent * inner.stride_bytes(side)
    if inner.stride_bytes(side) != component.element_bytes or inner.extent != num_vector:
        raise ConversionError(
            f"{side} {component.name}: {run_bytes} contiguous bytes where the kernels move "
            f"{VECTOR_BYTES}-byte vectors; the reference implementation converts such pages",
            code="short-run",
            field=component.name,
            got=run_bytes,
            expected=f"runs of a multiple of {VECTOR_BYTES} bytes",
        )
    offsets = [("base", placed.page_start_bytes + component.base_bytes)]
    offsets += [(axis.name, axis.stride_bytes(side)) for axis in axes if axis is not inner]
    for name, offset in offsets:
        if offset % VECTOR_BYTES:
            raise ConversionError(
                f"{side} {component.name}: {name} offset {offset} is not a multiple of "
                f"{VECTOR_BYTES}",
                code="unaligned-offset",
                field=f"{component.name}.{name}",
                got=offset,
                expected=f"a multiple of {VECTOR_BYTES}",
            )
