"""One hand-over, checked against everything that is independent of kvpd."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from tests.vllm.model import ModelShape
from tests.vllm.oracle import PageShape
from tests.vllm.pair import DECODE_TOKENS, HandOver, Pair, kvpd_transfer, pair_options


class Colocated(Protocol):
    """Tokens of one engine that prefills and decodes by itself (conftest.py)."""

    def __call__(
        self,
        shape: ModelShape,
        block_size: int,
        batch: Sequence[Sequence[int]],
        max_tokens: int = DECODE_TOKENS,
    ) -> list[list[int]]: ...


def page_shape(shape: ModelShape, block_size: int) -> PageShape:
    return PageShape(shape.kv_heads, block_size, shape.head_dim, shape.dtype)


def kvpd_pair(
    model: Path, directory: Path, decode: dict[str, Any] | None = None, **common: Any
) -> Pair:
    """A standard prefill and a shuffled decoder that converts."""
    options = pair_options(
        model,
        "standard",
        "shuffled",
        kvpd_transfer("kv_producer"),
        kvpd_transfer("kv_consumer", **({"page_format_conversion": True} | (decode or {}))),
        **common,
    )
    return Pair(*options, directory)


def assert_uses(pair: Pair, prefill: str, decode: str, layouts: tuple[str, str]) -> None:
    """The engines run what the test believes they run; else it would test CPU_ATTN."""
    for side, implementation, layout in (
        (pair.prefill, prefill, layouts[0]),
        (pair.decode, decode, layouts[1]),
    ):
        assert side.facts["implementations"] == [implementation]
        assert side.facts["layout"] == layout


def checked_hand_over(
    pair: Pair,
    batch: Sequence[Sequence[int]],
    expected_tokens: Sequence[Sequence[int]],
    pages: PageShape,
    directory: Path,
    max_tokens: int = DECODE_TOKENS,
) -> HandOver:
    """Hand prompts over at once; tokens equal the colocated ones, pages the shuffled source pages.

    Pages are looked at when they are reported received and have not been used yet.
    """
    requests = pair.prefill_only(batch, max_tokens)
    source = pair.prefill.pages(directory)
    result = pair.decode_only(requests)
    assert list(result.tokens.values()) == list(expected_tokens)
    assert set(result.local_blocks) == set(result.tokens), "not every request was received"
    for name, local in result.local_blocks.items():
        received = result.requested_blocks[name]
        remote = result.remote_blocks[name][-len(received) :]
        assert received == local[len(local) - len(received) :]
        assert received
        expected = pages.shuffle(source[:, remote])
        assert np.array_equal(result.received_pages[name][:, received], expected), name
    return result
