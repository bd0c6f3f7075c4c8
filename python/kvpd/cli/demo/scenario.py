"""What a demo run does: shape, requests and block ids, all from one seed."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from kvpd.errors import FormatError

ELEMENT_BYTES = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
}
PREFILL_POISON = 0xA5
DECODE_POISON = 0x5C


@dataclass(frozen=True)
class Scenario:
    """The shape of both caches and what is moved between them.

    Attributes:
        layers, heads, tokens, head_dim: L, H, tokens per page N, D of one rank.
        dtype: element type of both caches.
        blocks: pages moved per layer, over all requests.
        requests: in how many requests they are moved.
        seed: of tokens and block ids.
    """

    layers: int = 8
    heads: int = 8
    tokens: int = 16
    head_dim: int = 128
    dtype: str = "bfloat16"
    blocks: int = 64
    requests: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("layers", "heads", "tokens", "head_dim", "blocks", "requests"):
            if getattr(self, name) < 1:
                raise FormatError(
                    f"{name} must be at least 1",
                    code="too-small",
                    field=name,
                    got=getattr(self, name),
                    expected="at least 1",
                )
        if self.requests > self.blocks:
            raise FormatError(
                "every request needs a block",
                code="too-small",
                field="blocks",
                got=self.blocks,
                expected=f"at least {self.requests}",
            )

    @property
    def element_bytes(self) -> int:
        """Bytes of one element."""
        return ELEMENT_BYTES[self.dtype]

    @property
    def prefill_blocks(self) -> int:
        """Blocks of the prefill's cache: more than are used."""
        return self.blocks + self.blocks // 2 + 7

    @property
    def decode_blocks(self) -> int:
        """Blocks of the decoder's cache: more than are used, and another number."""
        return self.blocks + self.blocks // 3 + 5

    @property
    def layer_names(self) -> tuple[str, ...]:
        """One name per layer."""
        return tuple(f"layer.{layer}" for layer in range(self.layers))

    def request_ids(self) -> tuple[str, ...]:
        """Names of the requests."""
        return tuple(f"request-{index:03}" for index in range(self.requests))

    def token_ids(self, request_id: str) -> np.ndarray[Any, np.dtype[np.uint32]]:
        """The request's tokens [T]; the last page is filled by half."""
        index = self.request_ids().index(request_id)
        num_blocks = len(self._split(np.arange(self.blocks))[index])
        num_tokens = num_blocks * self.tokens - self.tokens // 2
        rng = np.random.default_rng([self.seed, 1, index])
        return rng.integers(0, 150_000, size=num_tokens, dtype=np.uint32)

    def prefill_ids(self) -> dict[str, list[int]]:
        """The prefill's block ids per request: random and distinct."""
        return self._draw(2, self.prefill_blocks)

    def decode_ids(self) -> dict[str, list[int]]:
        """The decoder's block ids per request: random and distinct."""
        return self._draw(3, self.decode_blocks)

    def to_json(self) -> dict[str, Any]:
        """Plain values; `Scenario(**values)` is equal."""
        return asdict(self)

    def _draw(self, stream: int, num_blocks: int) -> dict[str, list[int]]:
        rng = np.random.default_rng([self.seed, stream])
        ids = rng.permutation(num_blocks)[: self.blocks]
        parts = self._split(ids)
        return {name: part.tolist() for name, part in zip(self.request_ids(), parts, strict=True)}

    def _split(self, ids: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
        return np.array_split(ids, self.requests)
