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


class _Entry(msgspec.Struct, gc=False):
    """One tensor of a header; the header's own ``__metadata__`` has none of these."""

    dtype: str = ""
    shape: list[int] = []
    data_offsets: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class _File:
    """Where tensors lie: offsets count from `data_start`."""

    path: Path
    data_start: int


_Tensors = dict[str, tuple[_File, _Entry]]


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
    listing = [f"{name!r} {entry.dtype!r} {entry.shape}" for name, (_, entry) in tensors.items()]
    digest = hashlib.sha256(b"kvpd weights 1\n")
    digest.update(hashlib.sha256("\n".join(sorted(listing)).encode()).digest())
    chosen = _chosen(tensors)
    samples = _samples(tensors, chosen, deadline)
    for name in sorted(chosen):
        digest.update(f"{name!r} {len(samples[name])}\n".encode() + samples[name])
    return digest.hexdigest()[:_DIGITS]


def _headers(files: Sequence[Path], deadline: float) -> _Tensors:
    if not 0 < len(files) <= MAX_FILES:
        raise unknown(f"{len(files)} files; 1 to {MAX_FILES} are read")
    tensors: _Tensors = {}
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
        data_start, before = 8 + length, len(tensors)
        for name, entry in entries.items():
            start, end = entry.data_offsets
            if not 0 <= start <= end <= size - data_start:
                raise unknown(f"{path.name}: {name[:256]!r} is past the file's end")
        file_of = _File(path, data_start)
        tensors.update((name, (file_of, entry)) for name, entry in entries.items())
        if len(tensors) != before + len(entries):
            raise unknown(
                f"{path.name} has a tensor that is in another file too: it is there twice"
            )
    if not tensors:
        raise unknown("the files hold no tensor")
    return tensors


def _chosen(tensors: _Tensors) -> list[str]:
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


def _samples(tensors: _Tensors, chosen: Sequence[str], deadline: float) -> dict[str, bytes]:
    samples: dict[str, bytes] = {}
    by_file: dict[_File, list[tuple[int, int, str]]] = {}
    for name in chosen:
        of, entry = tensors[name]
        start, end = entry.data_offsets
        by_file.setdefault(of, []).append((of.data_start + start, end - start, name))
    for of, places in by_file.items():
        with of.path.open("rb", buffering=0) as file:
            for start, num_bytes, name in sorted(places):
                _in_time(deadline)
                samples[name] = b"".join(
                    _read(file, start + at, length) for at, length in _windows(name, num_bytes)
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
