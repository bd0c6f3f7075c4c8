"""Which code was run: one digest of everything that kvpd is made of."""

from __future__ import annotations

import hashlib
from pathlib import Path

ROOT = Path(__file__).parents[2]
CODE = ("crates", "python/kvpd")
# What building and testing leaves there; git ignores it too.
_NOT_CODE_DIRECTORIES = frozenset({"__pycache__", "target", "proptest-regressions"})
_NOT_CODE_SUFFIXES = frozenset({".so", ".pyc"})


def code_files(root: Path = ROOT) -> list[str]:
    """The files the digest is of, by path from the root, sorted."""
    found = []
    for top in CODE:
        for path in (root / top).rglob("*"):
            name = path.relative_to(root)
            is_left_out = _NOT_CODE_DIRECTORIES & set(name.parts) or any(
                part.endswith(".egg-info") for part in name.parts
            )
            if path.is_file() and path.suffix not in _NOT_CODE_SUFFIXES and not is_left_out:
                found.append(name.as_posix())
    return sorted(found)


def code_digest(root: Path = ROOT) -> str:
    """SHA-256, hex, over path and content of each file; the same without git."""
    digest = hashlib.sha256()
    for name in code_files(root):
        content = (root / name).read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()
