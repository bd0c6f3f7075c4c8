"""What a shuffled or a keyed cache must hold, from a standard one, on whole pages."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tests.oracle.pages import ELEMENT_BYTES, Spec, planes


@dataclass(frozen=True)
class PageShape:
    """H heads, N tokens, D channels of one block."""

    heads: int
    tokens: int
    head_dim: int
    dtype: str

    def shuffle(self, pages: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Standard pages [..., page bytes] as shuffled pages, K plane then V plane."""
        numbers = np.arange(2 * self.heads * self.tokens * self.head_dim)
        standard = numbers.reshape(self.heads, self.tokens, 2 * self.head_dim)
        k, v = standard[..., : self.head_dim], standard[..., self.head_dim :]
        spec = Spec("aiter-shuffle", "tiled", self.heads, self.tokens, self.head_dim, self.dtype)
        table = np.concatenate(planes(spec, k, v)).astype(np.intp)
        if not np.array_equal(np.sort(table), numbers):
            raise AssertionError("the oracle is not a permutation")
        elements = pages.view(f"u{ELEMENT_BYTES[self.dtype]}")
        return np.ascontiguousarray(np.take(elements, table, axis=-1)).view(np.uint8)

    def keyed(self, pages: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Standard pages [..., page bytes] as keyed ones: V, then K with each word XORed."""
        if ELEMENT_BYTES[self.dtype] != 2:
            raise ValueError(f"keyed pages have elements of two bytes, not {self.dtype}")
        rows = np.ascontiguousarray(pages).view("<u2").reshape(-1, 2 * self.head_dim)
        k, v = rows[:, : self.head_dim], rows[:, self.head_dim :]
        out = np.hstack([v, np.bitwise_xor(k, np.uint16(0x5AA5))])
        return out.view(np.uint8).reshape(pages.shape)
