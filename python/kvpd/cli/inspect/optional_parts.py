"""The readable parts of a tag, whatever version it has; nothing that could be a memory handle."""

from __future__ import annotations

import re
from typing import Any

import msgspec

REQUIRED_PARTS = frozenset({"engine_id", "facts", "formats", "regions"})
_HANDLE_WORDS = ("handle", "rkey", "secret")


def open_tag(tag: bytes) -> tuple[dict[str, Any], tuple[str, ...]]:
    """A tag as plain JSON values.

    Byte strings and fields that are named like handles are left out, at any depth, and so is the
    optional part that had them: with them who reads a saved file could reach the engine's memory.

    Returns:
        The fields, and the paths of those that were left out.

    Raises:
        ValueError: the tag is no MessagePack map, or too deep.
    """
    try:
        fields = msgspec.msgpack.decode(tag, type=dict[str, Any])
        left_out: list[str] = []
        plain: dict[str, Any] = _scrubbed(fields, "", left_out)
        body = plain.get("body")
        if isinstance(body, dict):
            names = {re.split(r"[.\[]", path.removeprefix("body."))[0] for path in left_out}
            for name in names - REQUIRED_PARTS:
                # Half a part is none: what reads the file could refuse it as a whole.
                body.pop(name, None)
        return plain, tuple(left_out)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(str(error)) from error


def close_tag(fields: dict[str, Any]) -> bytes:
    """The tag again, as `kvpd.wire.decode_tag` takes it.

    Raises:
        ValueError: values that MessagePack has not.
    """
    body = fields.get("body")
    if isinstance(body, dict):
        # Left out because it holds keys to memory, but part of the wire format.
        fields = {**fields, "body": {**body, "nixl_metadata": b""}}
    try:
        return msgspec.msgpack.encode(fields)
    except (OverflowError, RecursionError, TypeError) as error:
        raise ValueError(str(error)) from error


class _LeftOut:
    """Stands for a value that is not passed on."""


_LEFT_OUT = _LeftOut()


def _scrubbed(value: Any, path: str, left_out: list[str]) -> Any:
    if isinstance(value, dict):
        kept = {}
        for name, item in value.items():
            where = f"{path}.{name}" if path else str(name)
            if not isinstance(name, str) or any(word in name.lower() for word in _HANDLE_WORDS):
                left_out.append(where)
                continue
            item = _scrubbed(item, where, left_out)
            if item is not _LEFT_OUT:
                kept[name] = item
        return kept
    if isinstance(value, list):
        items = [_scrubbed(item, f"{path}[{at}]", left_out) for at, item in enumerate(value)]
        return _LEFT_OUT if _LEFT_OUT in items else items
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    left_out.append(path)
    return _LEFT_OUT
