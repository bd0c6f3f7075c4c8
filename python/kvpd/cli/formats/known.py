"""The known page formats by the names the command line has for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvpd._kvpd import PageFormat


@dataclass(frozen=True)
class Known:
    """A row of the cheat sheet.

    Attributes:
        name: on the command line.
        k, v: each as a tensor in memory, outermost axis first.
        stored: in words.
        backends: who keeps such pages.
        make: the constructor with what is fixed about the row.
        options: keywords of the constructor.
    """

    name: str
    k: str
    v: str
    stored: str
    backends: str
    make: Callable[..., PageFormat]
    options: dict[str, Any]

    def format(self, heads: int, tokens: int, head_dim: int, dtype: str) -> PageFormat:
        """The format of a shape.

        Raises:
            FormatError: no such page can be.
        """
        return self.make(heads=heads, tokens=tokens, head_dim=head_dim, dtype=dtype, **self.options)


KNOWN = (
    Known(
        "standard",
        "[H, N, 2*D], first D",
        "[H, N, 2*D], last D",
        "one plane; K and V of a token side by side",
        "FlashAttention, FlashInfer, Triton, FlexAttention, AITER unified; AITER FA unshuffled",
        PageFormat.standard,
        {"interior": "HNC"},
    ),
    Known(
        "standard-nhc",
        "[N, H, 2*D], first D",
        "[N, H, 2*D], last D",
        "as standard, all heads of a token together",
        "the same, in layouts LBNHC (NHD) and BLNHC",
        PageFormat.standard,
        {"interior": "NHC"},
    ),
    Known(
        "split-kv",
        "[H, N, D]",
        "[H, N, D]",
        "a K plane, then a V plane",
        "backends that keep K and V apart",
        PageFormat.split_kv,
        {"interior": "HNC"},
    ),
    Known(
        "split-kv-nhc",
        "[N, H, D]",
        "[N, H, D]",
        "a K plane, then a V plane, all heads of a token together",
        "the same, in token-major order",
        PageFormat.split_kv,
        {"interior": "NHC"},
    ),
    Known(
        "aiter-shuffle",
        "[H, D/x, N, x]",
        "[H, N/x, D, x]",
        "a K plane of whole 16-byte pieces, a V plane of x tokens side by side",
        "AITER FA with VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT=1",
        PageFormat.aiter_shuffle,
        {"v": "tiled"},
    ),
    Known(
        "aiter-shuffle-transposed",
        "[H, D/x, N, x]",
        "[H, D, N]",
        "as aiter-shuffle, all tokens of a channel side by side in V",
        "AITER's Triton cache writer",
        PageFormat.aiter_shuffle,
        {"v": "transposed"},
    ),
)

BY_NAME = {known.name: known for known in KNOWN}
