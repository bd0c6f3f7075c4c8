"""Where elements lie, by reshaping and transposing arrays of element numbers.

Imports nothing of kvpd. A page is described by the shape its plane has in memory; the tokens are
`k` and `v` of [H, N, D].
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.generic]

ELEMENT_BYTES = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "uint8": 1,
}


@dataclass(frozen=True)
class Spec:
    """A known page format: family, variant, extents, element type."""

    family: str
    variant: str
    heads: int
    tokens: int
    head_dim: int
    dtype: str

    @property
    def element_bytes(self) -> int:
        return ELEMENT_BYTES[self.dtype]

    @property
    def x(self) -> int:
        """Elements of one 16-byte access."""
        return 16 // self.element_bytes


def planes(spec: Spec, k: Array, v: Array) -> tuple[Array, ...]:
    """The planes of one page, flat, from its tokens `k` and `v` of [H, N, D]."""
    heads, tokens, head_dim, x = spec.heads, spec.tokens, spec.head_dim, spec.x
    if spec.family == "standard":
        packed = np.concatenate([k, v], axis=2)
        return ((packed if spec.variant == "HNC" else packed.transpose(1, 0, 2)).reshape(-1),)
    if spec.family == "split-kv":
        order = (0, 1, 2) if spec.variant == "HNC" else (1, 0, 2)
        return k.transpose(order).reshape(-1), v.transpose(order).reshape(-1)
    k_plane = k.reshape(heads, tokens, head_dim // x, x).transpose(0, 2, 1, 3).reshape(-1)
    if spec.variant == "tiled":
        tiles = v.reshape(heads, tokens // x, x, head_dim)
        return k_plane, tiles.transpose(0, 1, 3, 2).reshape(-1)
    return k_plane, v.transpose(0, 2, 1).reshape(-1)


def offsets(spec: Spec) -> dict[str, tuple[int, NDArray[np.int64]]]:
    """For k and v: the plane, and the byte offset of each element, [H, N, D]."""
    count = spec.heads * spec.tokens * spec.head_dim
    shape = (spec.heads, spec.tokens, spec.head_dim)
    k = np.arange(count, dtype=np.int64).reshape(shape)
    v = k + count
    found: dict[str, tuple[int, NDArray[np.int64]]] = {}
    for number, plane in enumerate(planes(spec, k, v)):
        place = np.full(2 * count, -1, dtype=np.int64)
        place[plane] = np.arange(plane.size) * spec.element_bytes
        for name, ids in (("k", k), ("v", v)):
            if place[ids.flat[0]] >= 0:
                found[name] = (number, place[ids])
    return found


def axis(offset: NDArray[np.int64], axis_number: int) -> tuple[int, int, int, int]:
    """(extent, tile, tile stride, stride) of one axis; the tile is where the offsets break."""
    line = np.moveaxis(offset, axis_number, 0)[:, 0, 0] - offset[0, 0, 0]
    extent = len(line)
    if extent == 1:
        return 1, 1, 0, 0
    stride = int(line[1])
    breaks = np.nonzero(line != np.arange(extent) * stride)[0]
    if len(breaks) == 0:
        return extent, extent, 0, stride
    tile = int(breaks[0])
    return extent, tile, int(line[tile]), stride


def digest(spec: Spec) -> str:
    """SHA-256 of the canonical text, derived from the offsets alone."""
    found = offsets(spec)
    count = spec.heads * spec.tokens * spec.head_dim
    element = spec.element_bytes
    num_planes = len({plane for plane, _ in found.values()})
    lines = ["kvpd page format 1"]
    lines += [f"plane {2 * count * element // num_planes}"] * num_planes
    for name in sorted(found):
        plane, offset = found[name]
        texts = ["{}/{}:{}:{}".format(*axis(offset, number)) for number in range(3)]
        lines.append(
            f"component {name} {spec.dtype} plane {plane} base {int(offset[0, 0, 0])} "
            f"heads {texts[0]} tokens {texts[1]} channels {texts[2]}"
        )
    return hashlib.sha256(("\n".join(lines) + "\n").encode()).hexdigest()
