"""Text of a peer, made safe for a terminal."""

from __future__ import annotations


def printable(text: str) -> str:
    """The text with control characters as escapes: a peer's name could steer the terminal."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
