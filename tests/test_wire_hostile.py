"""Hostile handshakes: whatever the bytes, a valid object, an untagged peer, or a `WireError`."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpd import wire
from kvpd.errors import WireError
from tests.test_wire import body, handshake, packed

VALID = wire.encode(handshake())
TAG = msgspec.msgpack.decode(VALID)["kvpd"]


def outcome(blob: bytes) -> wire.Handshake | WireError | None:
    """Anything but a `WireError` escapes and fails the test."""
    try:
        return wire.decode(blob)
    except WireError as error:
        assert error.code
        assert error.field
        return error


@given(st.binary(max_size=400))
@settings(max_examples=400, deadline=None)
def test_random_bytes(blob: bytes) -> None:
    outcome(blob)
    outcome(msgspec.msgpack.encode({"kvpd": blob}))
    outcome(msgspec.msgpack.encode({"kvpd": msgspec.msgpack.encode({"version": 1}) + blob}))


edits = st.lists(
    st.tuples(
        st.sampled_from(["replace", "insert", "delete"]),
        st.integers(0, 1 << 20),
        st.binary(min_size=1, max_size=6),
    ),
    min_size=1,
    max_size=4,
)


def edited(blob: bytes, changes: list[tuple[str, int, bytes]]) -> bytes:
    result = bytearray(blob)
    for kind, where, new in changes:
        at = where % (len(result) + 1)
        if kind == "insert":
            result[at:at] = new
        elif kind == "delete":
            del result[at : at + len(new)]
        else:
            result[at : at + len(new)] = new
    return bytes(result)


@given(edits)
@settings(max_examples=400, deadline=None)
def test_mutated_bytes(changes: list[tuple[str, int, bytes]]) -> None:
    outcome(edited(VALID, changes))
    got = outcome(msgspec.msgpack.encode({"kvpd": edited(TAG, changes)}))
    if isinstance(got, wire.Handshake):
        # Whatever got through is valid: it can be sent again and means the same.
        again = wire.decode(wire.encode(got))
        assert again is not None and again.description == got.description


leaf = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.sampled_from([0, 1, 2**31 - 1, 2**31, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1]),
    st.floats(),
    st.text(max_size=20),
    st.binary(max_size=20),
)
value = st.recursive(
    leaf,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)


def places(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every path into a structure."""
    items: list[tuple[Any, Any]] = []
    if isinstance(node, dict):
        items = list(node.items())
    elif isinstance(node, list):
        items = list(enumerate(node))
    found = [path] if path else []
    for key, inner in items:
        found += places(inner, (*path, key))
    return found


PLACES = places(body())


@given(st.lists(st.tuples(st.sampled_from(PLACES), value), min_size=1, max_size=3))
@settings(max_examples=600, deadline=None)
def test_any_value_anywhere(changes: list[tuple[tuple[Any, ...], Any]]) -> None:
    sent = body()
    for path, new in changes:
        node = sent
        try:
            for key in path[:-1]:
                node = node[key]
            node[path[-1]] = new
        except (TypeError, KeyError, IndexError):
            continue  # an earlier change removed the place
    got = outcome(packed(sent))
    if isinstance(got, wire.Handshake):
        again = wire.decode(wire.encode(got))
        assert again is not None and again.description == got.description
