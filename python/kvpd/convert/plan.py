"""What a kernel is compiled for: the index arithmetic of a pair of formats, cut into tiles."""

from __future__ import annotations

from dataclasses import dataclass, replace
from hashlib import sha256
from math import gcd, prod
from typing import TYPE_CHECKING

from kvpd.convert.axes import VECTOR_BYTES, Axis, Side, common_axes, in_order
from kvpd.convert.components import match_components
from kvpd.errors import ConversionError

if TYPE_CHECKING:
    from kvpd._kvpd import PageFormat

# head, up to three token axes, up to three channel axes
MAX_RANK = 7


@dataclass(frozen=True)
class Tuning:
    """How work is cut; no value changes which bytes are written.

    Attributes:
        tile_bytes: page bytes of a tile, which is permuted as a whole.
        part_bytes: page bytes that a program holds in registers, at least one tile; a longer page
            is cut into parts, whose programs meet before they write in place.
        thread_bytes: page bytes in flight per thread, from which the number of warps follows.
        num_warps: warps per program; None derives it from `thread_bytes`.
        num_programs: resident programs that share all parts; None launches one per part. Not in
            place with several parts, where a program may wait for one that was not launched.
        gather: load components whose vectors stay whole in the target's order (no exchange between
            threads) rather than in the source's order.
    """

    tile_bytes: int
    part_bytes: int
    thread_bytes: int = 128
    num_warps: int | None = None
    num_programs: int | None = None
    gather: bool = False


IN_PLACE = Tuning(tile_bytes=65536, part_bytes=65536, thread_bytes=512)
OUT_OF_PLACE = Tuning(tile_bytes=8192, part_bytes=8192)
# Pages of another GPU: a link needs far fewer programs than memory does, and the fewer there are,
# the less a decode step beside them is slowed. Each keeps a whole page in flight.
DIRECT = Tuning(tile_bytes=16384, part_bytes=65536, num_programs=32)


@dataclass(frozen=True)
class Walk:
    """Byte offsets of a tile's vectors in one order, axes from the innermost.

    Vector v has the coordinates of v in mixed radix `extents`; a coordinate at or beyond its limit
    is padding up to a power of two.
    """

    extents: tuple[int, ...]
    limits: tuple[int, ...]
    strides_bytes: tuple[int, ...]


@dataclass(frozen=True)
class ComponentPlan:
    """One component of one tile: load vectors, permute elements, store vectors.

    Attributes:
        unit_bytes: size of the integers that are moved (1, 2 or 4).
        num_vectors: 16-byte vectors of a tile, a power of two.
        source_start_bytes, target_start_bytes: page offset of tile 0.
        source_step_bytes, target_step_bytes: page offset from one tile to the next.
        load, store: where the vectors lie.
        shape, order: the permutation between the two, padded to `MAX_RANK`; empty if there is none.
    """

    unit_bytes: int
    num_vectors: int
    source_start_bytes: int
    target_start_bytes: int
    source_step_bytes: int
    target_step_bytes: int
    load: Walk
    store: Walk
    shape: tuple[int, ...]
    order: tuple[int, ...]

    @property
    def is_padded(self) -> bool:
        """Whether some vectors stand for nothing and must be masked."""
        return self.load.extents != self.load.limits


@dataclass(frozen=True, repr=False, eq=False)
class KernelPlan:
    """All components of a page, the page being `num_tiles` tiles of whole heads.

    Hash, equality and repr stand for the content: the compiler keys its caches by them.
    """

    components: tuple[ComponentPlan, ...]
    num_tiles: int
    tile_bytes: int
    key: str = ""

    def __repr__(self) -> str:
        return f"KernelPlan({self.key})"

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KernelPlan) and self.key == other.key


def plan_kernel(source: PageFormat, target: PageFormat, tuning: Tuning) -> KernelPlan:
    """Derive the kernel's index arithmetic from two formats.

    Raises:
        ConversionError: different components, or offsets that 16-byte vectors cannot reach.
    """
    for page_format in (source, target):
        if page_format.page_bytes >= 2**31:
            raise ConversionError(
                f"a page of {page_format.name} has {page_format.page_bytes} bytes",
                code="page-too-long",
                field="page_bytes",
                got=page_format.page_bytes,
                expected=f"< {2**31}",
            )
    pairs = match_components(source, target)
    heads = gcd(*(placed.component.heads for _, placed in pairs))
    num_tiles = _num_tiles(heads, source.page_bytes, tuning.tile_bytes)
    components: list[ComponentPlan] = []
    for a, b in pairs:
        axes = common_axes(a, b)
        plan = _component(axes, a.component.element_bytes, a.component.heads, num_tiles, tuning)
        plan = replace(
            plan,
            source_start_bytes=a.page_start_bytes + a.component.base_bytes,
            target_start_bytes=b.page_start_bytes + b.component.base_bytes,
            source_step_bytes=a.component.heads // num_tiles * a.component.head_stride_bytes,
            target_step_bytes=b.component.heads // num_tiles * b.component.head_stride_bytes,
        )
        components.append(plan)
    plan_of_page = KernelPlan(tuple(components), num_tiles, source.page_bytes // num_tiles)
    content = repr((plan_of_page.components, plan_of_page.num_tiles))
    return replace(plan_of_page, key=sha256(content.encode()).hexdigest())


def _num_tiles(heads: int, page_bytes: int, tile_bytes: int) -> int:
    """The fewest tiles of whole heads that fit `tile_bytes`, with a power of two of heads each."""
    divisors = [count for count in range(1, heads + 1) if heads % count == 0]
    powers = [count for count in divisors if (heads // count).bit_count() == 1]
    fitting = [count for count in powers if page_bytes // count <= tile_bytes]
    return fitting[0] if fitting else powers[-1]


def _component(
    axes: tuple[Axis, ...], element_bytes: int, heads: int, num_tiles: int, tuning: Tuning
) -> ComponentPlan:
    axes = tuple(
        replace(axis, extent=heads // num_tiles) if axis.name == "head" else axis for axis in axes
    )
    axes = tuple(axis for axis in axes if axis.extent > 1)
    load_axes, store_axes = in_order(axes, "source"), in_order(axes, "target")
    unit_bytes = element_bytes
    if load_axes[-1] == store_axes[-1]:
        # Vectors stay whole: any unit will do, and the widest needs the fewest moves.
        whole = load_axes[-1]
        unit_bytes = 4
        wide = replace(
            whole, extent=VECTOR_BYTES // 4, source_stride_bytes=4, target_stride_bytes=4
        )
        if tuning.gather:
            load_axes = store_axes
        load_axes, store_axes = (*load_axes[:-1], wide), (*store_axes[:-1], wide)
    order = tuple(load_axes.index(axis) for axis in store_axes)
    padding = MAX_RANK - len(order)
    moves = order != tuple(range(len(order)))
    shape = (1,) * padding + tuple(_padded(axis.extent) for axis in load_axes)
    return ComponentPlan(
        unit_bytes=unit_bytes,
        num_vectors=prod(_padded(axis.extent) for axis in load_axes[:-1]),
        source_start_bytes=0,
        target_start_bytes=0,
        source_step_bytes=0,
        target_step_bytes=0,
        load=_walk(load_axes[:-1], "source"),
        store=_walk(store_axes[:-1], "target"),
        shape=shape if moves else (),
        order=(*range(padding), *(padding + i for i in order)) if moves else (),
    )


def _padded(extent: int) -> int:
    return 1 << (extent - 1).bit_length()


def _walk(axes: tuple[Axis, ...], side: Side) -> Walk:
    """Axes outermost first; neighbours that one stride describes are joined."""
    extents: list[int] = []
    limits: list[int] = []
    strides: list[int] = []
    for axis in reversed(axes):
        stride = axis.stride_bytes(side)
        dense = extents and extents[-1] == limits[-1] and stride == strides[-1] * extents[-1]
        if dense:
            extents[-1] *= _padded(axis.extent)
            limits[-1] *= axis.extent
        else:
            extents.append(_padded(axis.extent))
            limits.append(axis.extent)
            strides.append(stride)
    return Walk(tuple(extents), tuple(limits), tuple(strides))
