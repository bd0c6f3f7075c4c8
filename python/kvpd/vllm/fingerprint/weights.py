"""A digest of samples of a checkpoint's tensors, by their names.

What is sampled depends on the names, types and shapes of all tensors and on nothing else: not on
how many files hold them or where, nor on how an engine cuts them. So two sides that load one
checkpoint have one digest, and two that differ in a sampled byte have two.

Tensors are of a *kind* if their names differ in numbers only (the same projection of each layer).
Of each kind a few are taken, so that a checkpoint that differs in one kind of tensor only, in all
layers, is seen whatever else there is. A file is never read as a whole.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

from kvpd.vllm.fingerprint.checkpoint import unknown

MAX_FILES = 4096
# The headers of all files together; those of 200,000 tensors have 30 MB.
MAX_HEADER_BYTES = 64 << 20
TENSORS_A_KIND = 16
MAX_KINDS = 256
WINDOWS = 4
WINDOW_BYTES = 128
_NUMBER = re.compile(r"\d+")
_DIGITS = 32


class _Entry(msgspec.Struct):
    """One tensor of a header; the header's own ``__metadata__`` has none of these."""

    dtype: str = ""
    shape: list[int] = []
    data_offsets: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class _Tensor:
    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int


def weights_digest(files: Sequence[Path], *, seconds: float = 1.0) -> str:
    """The digest of a checkpoint, 32 hexadecimal digits.

    Args:
        files: its safetensors files, in any order.
        seconds: patience; more is not spent, but for a read that does not return.

    Raises:
        KvpdError: a file is no safetensors file, or it takes too long.
        OSError: a file cannot be read.
    """
    deadline = time.monotonic() + seconds
    tensors = _headers(files, deadline)
    listing, digest = hashlib.sha256(), hashlib.sha256(b"kvpd weights 1\n")
    for name in sorted(tensors):
        tensor = tensors[name]
        listing.update(f"{name!r} {tensor.dtype} {tensor.shape}\n".encode())
    digest.update(listing.digest())
    chosen = _chosen(tensors)
    samples = _samples(tensors, chosen, deadline)
    for name in sorted(chosen):
        digest.update(f"{name!r} {len(samples[name])}\n".encode() + samples[name])
    return digest.hexdigest()[:_DIGITS]


def _headers(files: Sequence[Path], deadline: float) -> dict[str, _Tensor]:
    if not 0 < len(files) <= MAX_FILES:
        raise unknown(f"{len(files)} files; 1 to {MAX_FILES} are read")
    tensors: dict[str, _Tensor] = {}
    left = MAX_HEADER_BYTES
    for path in files:
        _in_time(deadline)
        with path.open("rb", buffering=0) as file:
            size = path.stat().st_size
            length = int.from_bytes(_read(file, 0, 8), "little")
            if length > min(left, size - 8):
                raise unknown(f"{path.name}: a header of {length} bytes in a file of {size}")
            left -= length
            header = _read(file, 8, length)
        try:
            entries = msgspec.json.decode(header, type=dict[str, _Entry])
        except (msgspec.DecodeError, RecursionError) as error:
            raise unknown(f"{path.name}: no safetensors header: {error}") from error
        entries.pop("__metadata__", None)
        for name, entry in entries.items():
            start, end = entry.data_offsets
            if not 0 <= start <= end <= size - 8 - length or name in tensors:
                raise unknown(f"{path.name}: {name[:256]!r} is twice there, or past the file's end")
            tensors[name] = _Tensor(
                path, entry.dtype, tuple(entry.shape), 8 + length + start, end - start
            )
    if not tensors:
        raise unknown("the files hold no tensor")
    return tensors


def _chosen(tensors: dict[str, _Tensor]) -> list[str]:
    kinds: dict[str, list[str]] = {}
    for name in tensors:
        kinds.setdefault(_NUMBER.sub("#", name), []).append(name)
    return [
        name
        for kind in _least(list(kinds), MAX_KINDS)
        for name in _least(kinds[kind], TENSORS_A_KIND)
    ]


def _least(names: list[str], count: int) -> list[str]:
    """Which `count` are taken: arbitrary, and the same on every machine."""
    return names if len(names) <= count else sorted(names, key=_hash)[:count]


def _hash(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def _samples(
    tensors: dict[str, _Tensor], chosen: Sequence[str], deadline: float
) -> dict[str, bytes]:
    samples: dict[str, bytes] = {}
    by_file: dict[Path, list[str]] = {}
    for name in chosen:
        by_file.setdefault(tensors[name].path, []).append(name)
    for path, names in by_file.items():
        with path.open("rb", buffering=0) as file:
            for name in sorted(names, key=lambda name: tensors[name].start):
                _in_time(deadline)
                tensor = tensors[name]
                samples[name] = b"".join(
                    _read(file, tensor.start + at, length)
                    for at, length in _windows(name, tensor.num_bytes)
                )
    return samples


def _windows(name: str, num_bytes: int) -> list[tuple[int, int]]:
    """Which bytes of a tensor are read: all of a short one, else both ends and some between."""
    if num_bytes <= WINDOWS * WINDOW_BYTES:
        return [(0, num_bytes)]
    last = num_bytes - WINDOW_BYTES
    between = [
        int.from_bytes(_hash(f"{index} {num_bytes} {name}")[:8], "little") % (last + 1)
        for index in range(WINDOWS - 2)
    ]
    return [(at, WINDOW_BYTES) for at in (0, *sorted(between), last)]


def _read(file: BinaryIO, at: int, length: int) -> bytes:
    file.seek(at)
    parts = []
    while length > 0:
        part = file.read(length)
        if not part:
            raise unknown(f"{file.name} ends within what its header names")
        parts.append(part)
        length -= len(part)
    return b"".join(parts)


def _in_time(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise unknown("reading the samples took too long")
