"""What a shuffled cache must hold, from a standard one: the element oracle on whole pages."""

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
        table = np.concatenate(planes(spec, k, v))
        if not np.array_equal(np.sort(table), numbers):
            raise AssertionError("the oracle is not a permutation")
        elements = pages.reshape(*pages.shape[:-1], numbers.size, ELEMENT_BYTES[self.dtype])
        return elements[..., table, :].reshape(pages.shape)
