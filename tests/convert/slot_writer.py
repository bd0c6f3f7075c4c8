"""Pages written token by token, from the shapes engines document. Imports nothing of kvpd.

A second oracle beside `tests.oracle.pages`, which transposes whole pages; the two must agree.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.oracle.pages import Spec

UNSIGNED: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def random_tokens(rng: np.random.Generator, spec: Spec) -> tuple[NDArray[Any], NDArray[Any]]:
    """k and v of [N, H, D], any bit pattern, NaNs included."""
    shape = (spec.tokens, spec.heads, spec.head_dim * spec.element_bytes)
    unsigned = UNSIGNED[spec.element_bytes]
    k, v = (rng.integers(0, 256, shape, dtype=np.uint8).view(unsigned) for _ in range(2))
    return k, v


def write_page(spec: Spec, k: NDArray[Any], v: NDArray[Any]) -> NDArray[np.uint8]:
    """The bytes of one page holding tokens k and v of [N, H, D]."""
    page = np.zeros(2 * spec.heads * spec.tokens * spec.head_dim, UNSIGNED[spec.element_bytes])
    for n in range(spec.tokens):
        put_token(spec, page, n, k[n], v[n])
    return page.view(np.uint8)


def put_token(spec: Spec, page: NDArray[Any], n: int, k: NDArray[Any], v: NDArray[Any]) -> None:
    """Write K and V of [H, D] as token n of a page of elements."""
    heads, tokens, head_dim, x = spec.heads, spec.tokens, spec.head_dim, spec.x
    first, second = page[: page.size // 2], page[page.size // 2 :]
    for h in range(heads):
        if spec.family == "standard":
            slot = h * tokens + n if spec.variant == "HNC" else n * heads + h
            row = page[slot * 2 * head_dim :][: 2 * head_dim]
            row[:head_dim] = k[h]
            row[head_dim:] = v[h]
        elif spec.family == "split-kv":
            slot = h * tokens + n if spec.variant == "HNC" else n * heads + h
            first[slot * head_dim :][:head_dim] = k[h]
            second[slot * head_dim :][:head_dim] = v[h]
        else:
            keys = first.reshape(heads, head_dim // x, tokens, x)
            keys[h, :, n] = k[h].reshape(head_dim // x, x)
            if spec.variant == "tiled":
                values = second.reshape(heads, tokens // x, head_dim, x)
                values[h, n // x, :, n % x] = v[h]
            else:
                second.reshape(heads, head_dim, tokens)[h, :, n] = v[h]
