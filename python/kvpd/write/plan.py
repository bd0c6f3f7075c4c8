"""What a writer is compiled for: where a format puts an element, and how a batch is cut."""

from __future__ import annotations

from dataclasses import dataclass, replace
from hashlib import sha256
from typing import TYPE_CHECKING

from kvpd.convert.axes import VECTOR_BYTES
from kvpd.errors import WriteError

if TYPE_CHECKING:
    from kvpd._kvpd import Component, PageFormat

FLOATS = ("bfloat16", "float16")
EIGHT_BIT_FLOATS = ("float8_e4m3fn", "float8_e4m3fnuz")
# Beyond it vLLM's norm adds in an order of its own, and no model has such heads.
_MAX_NORM_DIM = 512


@dataclass(frozen=True)
class WriteTuning:
    """How a batch is cut; no value changes which bytes are written.

    Attributes:
        num_rows: tokens of a program, a power of two. A whole vector of tokens or more lets pages
            that keep tokens together be written in 16-byte stores.
        num_heads: heads of a program, a power of two.
        num_warps: warps of a program.
    """

    num_rows: int
    num_heads: int
    num_warps: int


@dataclass(frozen=True)
class ComponentPlan:
    """K or V inside a page: strides in bytes from a head's first element on.

    Attributes:
        num_vector: elements of 16 bytes.
        has_channel_vectors: every 16 bytes of a row's channels are side by side and aligned.
        has_groups: tokens are side by side instead, and a program takes whole vectors of them.
    """

    token_tile: int
    token_stride_bytes: int
    token_tile_stride_bytes: int
    channel_tile: int
    channel_stride_bytes: int
    channel_tile_stride_bytes: int
    num_vector: int
    has_channel_vectors: bool
    has_groups: bool


@dataclass(frozen=True)
class Work:
    """What a call does besides writing K and V, and for which model.

    Attributes:
        num_query_heads: heads of Q; 0 where Q is not touched.
        dtype: element type of Q, K and V, a 16-bit float.
        rotary_dim: channels that are rotated, the first of a head; 0 for none.
        is_neox: channel i is rotated with channel i + rotary_dim / 2; otherwise with its neighbour.
        has_norm: Q and K are normed before.
        is_in_place: rotated Q and K replace what they were made of.
        query_dtype: element type of rotated Q, `dtype` or an 8-bit float.
    """

    num_query_heads: int
    dtype: str
    rotary_dim: int = 0
    is_neox: bool = True
    has_norm: bool = False
    is_in_place: bool = False
    query_dtype: str = ""


@dataclass(frozen=True, repr=False, eq=False)
class WritePlan:
    """A kernel's compile-time constants.

    Hash, equality and repr stand for the content: the compiler keys its caches by them.
    """

    key: ComponentPlan
    value: ComponentPlan
    tokens: int
    head_dim: int
    num_kv_heads: int
    num_query_heads: int
    num_kv_groups: int
    num_query_groups: int
    num_rows: int
    num_heads: int
    dtype: str
    cache_dtype: str
    query_dtype: str
    rotary_dim: int
    is_neox: bool
    has_rotation: bool
    has_norm: bool
    is_in_place: bool
    has_vectors: bool
    digest: str = ""

    def __repr__(self) -> str:
        return f"WritePlan({self.digest})"

    def __hash__(self) -> int:
        return hash(self.digest)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WritePlan) and self.digest == other.digest


def key_and_value(format: PageFormat) -> tuple[Component, Component]:
    """K and V of a format that holds nothing else.

    Raises:
        WriteError: other components, or K and V of different extents or element types.
    """
    components = {component.name: component for component in format.components}
    if components.keys() != {"k", "v"}:
        raise WriteError(
            f"{format.name} holds {', '.join(sorted(components))}; a writer knows k and v",
            code="unknown-components",
            field="format",
            got=", ".join(sorted(components)),
            expected="k, v",
        )
    key, value = components["k"], components["v"]
    for field in ("dtype", "heads", "tokens", "channels"):
        got, expected = getattr(value, field), getattr(key, field)
        if got != expected:
            raise WriteError(
                f"{format.name}: v.{field} is {got}, k.{field} {expected}",
                code="unlike-components",
                field=f"v.{field}",
                got=got,
                expected=expected,
            )
    return key, value


def check_work(format: PageFormat, work: Work) -> None:
    """Refuse what no implementation writes.

    Raises:
        WriteError: an element type that is no float of 16 bits, a cache of other elements, a
            rotation that does not fit into a head, or a norm of a head that is too long.
    """
    key, _ = key_and_value(format)
    cache_dtypes = (work.dtype, *EIGHT_BIT_FLOATS)
    rotation = work.rotary_dim
    for field, ok, got, expected in (
        ("dtype", work.dtype in FLOATS, work.dtype, " or ".join(FLOATS)),
        ("format", key.dtype in cache_dtypes, key.dtype, " or ".join(cache_dtypes)),
        (
            "rotary_dim",
            0 <= rotation <= key.channels and rotation % 2 == 0,
            rotation,
            f"even, at most {key.channels}",
        ),
        (
            "has_norm",
            not work.has_norm
            or (rotation > 0 and key.channels <= _MAX_NORM_DIM and key.channels % 8 == 0),
            f"a norm of {key.channels} channels, {rotation} of them rotated",
            f"a multiple of 8 up to {_MAX_NORM_DIM} channels, with a rotation after it",
        ),
        (
            "query_dtype",
            work.query_dtype in ("", work.dtype, *EIGHT_BIT_FLOATS),
            work.query_dtype,
            " or ".join(cache_dtypes),
        ),
    ):
        if not ok:
            raise WriteError(
                f"{field} is {got}, expected {expected}",
                code=f"write-{field.replace('_', '-')}",
                field=field,
                got=got,
                expected=expected,
            )


def plan_write(format: PageFormat, work: Work, tuning: WriteTuning) -> WritePlan:
    """Derive a kernel's index arithmetic from a format.

    Raises:
        WriteError: as `check_work`.
    """
    check_work(format, work)
    key, value = key_and_value(format)
    rotates = work.rotary_dim > 0
    plan = WritePlan(
        key=_component(key, tuning.num_rows, is_rotated=rotates),
        value=_component(value, tuning.num_rows, is_rotated=False),
        tokens=key.tokens,
        head_dim=key.channels,
        num_kv_heads=key.heads,
        num_query_heads=work.num_query_heads,
        num_kv_groups=-(-key.heads // tuning.num_heads),
        num_query_groups=-(-work.num_query_heads // tuning.num_heads) if rotates else 0,
        num_rows=tuning.num_rows,
        num_heads=tuning.num_heads,
        dtype=work.dtype,
        cache_dtype=key.dtype,
        query_dtype=work.query_dtype or work.dtype,
        rotary_dim=work.rotary_dim,
        is_neox=work.is_neox,
        has_rotation=rotates,
        has_norm=work.has_norm,
        is_in_place=work.is_in_place,
        # Halves of a head begin at whole vectors too, or the hints would not hold.
        has_vectors=are_vectors(key.channels, work.rotary_dim),
    )
    fields = {name: getattr(plan, name) for name in plan.__dataclass_fields__ if name != "digest"}
    return replace(plan, digest=sha256(repr(fields).encode()).hexdigest())


def are_vectors(channels: int, rotary_dim: int) -> bool:
    """Whether heads, their halves and what is not rotated are made of 16-byte vectors."""
    num_vector = VECTOR_BYTES // 2
    return channels % num_vector == 0 and (rotary_dim // 2) % num_vector == 0


def _component(component: Component, num_rows: int, *, is_rotated: bool) -> ComponentPlan:
    element_bytes = component.element_bytes
    num_vector = VECTOR_BYTES // element_bytes
    channel_bytes = component.channel_tile * element_bytes
    token_bytes = component.token_tile * element_bytes
    outer = (component.head_stride_bytes, component.base_bytes)
    by_channel = (
        component.channel_stride_bytes == element_bytes
        and channel_bytes % VECTOR_BYTES == 0
        and _all_vectors(
            *outer,
            component.channel_tile_stride_bytes,
            component.token_stride_bytes,
            component.token_tile_stride_bytes,
        )
    )
    by_token = (
        component.token_stride_bytes == element_bytes
        and token_bytes % VECTOR_BYTES == 0
        and component.tokens % num_vector == 0
        and _all_vectors(
            *outer,
            component.token_tile_stride_bytes,
            component.channel_stride_bytes,
            component.channel_tile_stride_bytes,
        )
    )
    return ComponentPlan(
        token_tile=component.token_tile,
        token_stride_bytes=component.token_stride_bytes,
        token_tile_stride_bytes=component.token_tile_stride_bytes,
        channel_tile=component.channel_tile,
        channel_stride_bytes=component.channel_stride_bytes,
        channel_tile_stride_bytes=component.channel_tile_stride_bytes,
        num_vector=num_vector,
        has_channel_vectors=by_channel,
        # A rotated value is made by the program of its row: it is stored row by row.
        has_groups=by_token and not is_rotated and num_rows % num_vector == 0,
    )


def _all_vectors(*numbers: int) -> bool:
    return all(number % VECTOR_BYTES == 0 for number in numbers)
