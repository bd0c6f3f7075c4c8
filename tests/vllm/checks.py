"""One hand-over, checked against everything that is independent of kvpd."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tests.vllm.model import ModelShape
from tests.vllm.oracle import PageShape
from tests.vllm.pair import DECODE_TOKENS, HandOver, Pair, kvpd_transfer, pair_options

_WARNING = re.compile(r"\b(WARNING|ERROR|CRITICAL)\b")
_ABOUT_PAGES = re.compile("nixl|layout|connector|kv", re.IGNORECASE)


class Colocated(Protocol):
    """Tokens of one engine that prefills and decodes by itself (conftest.py)."""

    def __call__(
        self,
        shape: ModelShape,
        block_size: int,
        batch: Sequence[Sequence[int]],
        max_tokens: int = DECODE_TOKENS,
    ) -> list[list[int]]: ...


def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    """Wait for something that must happen."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def warnings_about_pages(log: str) -> list[str]:
    """Lines of an engine's log that warn of anything to do with its cache or its connector.

    Give it what was logged since the engine was up. Before that it knows no peer, and vLLM warns
    in any engine with a connector that connectors are experimental.
    """
    return [
        line for line in log.splitlines() if _WARNING.search(line) and _ABOUT_PAGES.search(line)
    ]


def page_shape(shape: ModelShape, block_size: int) -> PageShape:
    return PageShape(shape.kv_heads, block_size, shape.head_dim, shape.dtype)


def kvpd_pair(
    model: Path,
    directory: Path,
    decode: dict[str, Any] | None = None,
    decode_backend: str = "shuffled",
    **common: Any,
) -> Pair:
    """A standard prefill and a shuffled (or other) decoder that converts."""
    options = pair_options(
        model,
        "standard",
        decode_backend,
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
    oracle: Callable[[PageShape, NDArray[np.uint8]], NDArray[np.uint8]] = PageShape.shuffle,
) -> HandOver:
    """Hand prompts over at once; tokens equal the colocated ones, pages the converted source pages.

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
        expected = oracle(pages, source[:, remote])
        assert np.array_equal(result.received_pages[name][:, received], expected), name
    return result
