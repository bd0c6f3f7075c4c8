"""Which prompt a request's blocks were computed from, in 32 bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

_HEADER = b"kvpd prompt 1"


@dataclass(frozen=True)
class Media:
    """One image, sound or video of a prompt.

    Attributes:
        kind: vLLM's modality.
        content: hash of it; "" where the engine makes none.
        offset, length: tokens of the prompt that stand for it.
    """

    kind: str
    content: str
    offset: int
    length: int


def digest(token_ids: Sequence[int], media: Iterable[Media], adapter: str) -> str | None:
    """SHA-256, in hex, over everything of a request that decides its K and V.

    vLLM's own block hashes cannot be compared between engines: they depend on a seed and settings.

    Args:
        token_ids: int [N], the tokens that are covered.
        media: what stands for tokens among them.
        adapter: name of the LoRA adapter; "" without one.

    Returns:
        None where media have no hash of their content: nothing could be compared.
    """
    found = hashlib.sha256(_HEADER)
    _add(found, np.asarray(token_ids, dtype="<u4").tobytes())
    _add(found, adapter.encode())
    for item in media:
        if not item.content:
            return None
        place = np.array([item.offset, item.length], dtype="<i8").tobytes()
        for part in (item.kind.encode(), item.content.encode(), place):
            _add(found, part)
    return found.hexdigest()


def _add(found: hashlib._Hash, part: bytes) -> None:
    # With its length: what ends one part must not be what begins the next.
    found.update(len(part).to_bytes(8, "little"))
    found.update(part)
