"""What a requester makes of an exporter that denies, hangs up, or lies. Sockets are real."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

from kvpd import Region
from kvpd.direct import DirectError, DirectPart, HostIdentity
from kvpd.direct.channel import (
    MAX_ANSWER_BYTES,
    REQUEST,
    Allocation,
    Denied,
    Granted,
    address_of,
    decode,
    encode,
    new_socket,
)
from kvpd.direct.client import fetch
from kvpd.direct.mapping import _holders
from tests.direct.fake_driver import UUIDS
from tests.direct.test_part import PART

SECRET = bytes(range(64))
GRANTED = encode(Granted((Allocation(4096, SECRET), Allocation(1 << 20, SECRET))))


@contextmanager
def exporter(answer: Callable[[bytes], bytes | None]) -> Any:
    """A part whose endpoint sends what `answer` makes of the request; None hangs up at once."""
    listener = new_socket()
    name = f"kvpd-direct-{os.urandom(16).hex()}"
    listener.bind(address_of(name))
    listener.listen(1)

    def serve() -> None:
        try:
            connection, _ = listener.accept()
        except OSError:
            return  # nobody came
        with connection:
            said = answer(connection.recv(1 << 16))
            if said is not None:
                connection.send(said)

    thread = threading.Thread(target=serve)
    thread.start()
    host = HostIdentity.of_this_process()
    try:
        yield msgspec.structs.replace(PART, host=host, endpoint=name)
    finally:
        thread.join()
        listener.close()


def refused(part: DirectPart) -> tuple[str, str]:
    with pytest.raises(DirectError) as caught:
        fetch(part, UUIDS[0], timeout_seconds=5)
    assert "\\x01" not in str(caught.value)
    return caught.value.code, caught.value.got


def test_the_request_says_for_which_gpu_and_the_answer_is_taken() -> None:
    asked: list[str] = []

    def answer(message: bytes) -> bytes:
        asked.append(decode(message, REQUEST).device_uuid)
        return GRANTED

    with exporter(answer) as part:
        connection, allocations = fetch(part, UUIDS[2], timeout_seconds=5)
        connection.close()
    assert asked == [UUIDS[2]]
    assert [(a.base, a.handle) for a in allocations] == [(4096, SECRET), (1 << 20, SECRET)]


def test_a_denial_is_passed_on_in_its_own_words() -> None:
    with exporter(lambda _: encode(Denied("busy", "come back later"))) as part:
        assert refused(part) == ("denied", "busy")


def test_an_exporter_that_hangs_up() -> None:
    with exporter(lambda _: None) as part:
        assert refused(part)[0] == "denied"


@pytest.mark.parametrize(
    "said",
    [
        b"x",
        GRANTED[:-1],
        GRANTED + bytes(MAX_ANSWER_BYTES),
        encode(Granted(())),
        encode(Granted((Allocation(-1, SECRET),))),
        encode(Granted((Allocation(4096, SECRET[:63]),))),
        encode(Granted((Allocation(4096, SECRET + b"x"),))),
        encode(Granted((Allocation(4096, SECRET),) * 1025)),
        encode(Denied("", "no code")),
    ],
    ids=lambda said: f"{len(said)} bytes",
)
def test_what_is_no_answer(said: bytes) -> None:
    with exporter(lambda _: said) as part:
        assert refused(part)[0] == "malformed"


def test_another_version_names_both() -> None:
    said = msgspec.msgpack.encode({"version": 7, "body": {"another": "shape"}})
    with exporter(lambda _: said) as part:
        assert refused(part) == ("protocol-version", "7")


def test_nobody_there() -> None:
    with exporter(lambda _: GRANTED) as part:
        connection, _ = fetch(part, UUIDS[0], timeout_seconds=5)
        connection.close()
    assert refused(part)[0] == "unreachable"


def test_an_allocation_named_twice() -> None:
    region = Region(8192, 1, 64, 64, memory="vram")
    one, same, other = (Allocation(base, SECRET) for base in (4096, 4096, 1 << 20))
    assert _holders([region], [other, one]) == [one]
    with pytest.raises(DirectError) as caught:
        _holders([region], [one, other, same])
    assert caught.value.code == "malformed"
