"""What is said over the socket, who is at its other end, and that no handle is ever shown."""

from __future__ import annotations

import copy
import logging
import os
import pickle
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.pretty import pretty_repr

from kvpd.direct import DirectError
from kvpd.direct.channel import ANSWER, Allocation, Credentials, Denied, Granted, decode, encode
from kvpd.direct.driver import MemoryHandle
from kvpd.direct.server import OfferServer
from tests.direct.test_exporter import SECRET, ask


@given(st.binary(max_size=300), st.integers(0, 400), st.integers(0, 255))
@settings(max_examples=400)
def test_random_answers_are_answers_or_direct_errors(blob: bytes, at: int, byte: int) -> None:
    sent = bytearray(encode(Granted((Allocation(4096, SECRET), Allocation(8192, SECRET)))))
    sent[at % len(sent)] = byte
    for message in (blob, bytes(sent), bytes(sent[: at % len(sent)])):
        try:
            answer = decode(message, ANSWER)
        except DirectError as error:
            assert error.code in ("malformed", "protocol-version")
            assert SECRET[8:16].hex() not in str(error) and repr(SECRET[8:16])[2:-1] not in str(
                error
            )
        else:
            assert isinstance(answer, Granted | Denied)


def test_whose_credentials_count() -> None:
    own = os.geteuid()
    dead = subprocess.Popen(["true"])
    dead.wait()
    assert Credentials(os.getpid(), own).is_ours
    assert not Credentials(os.getpid(), own + 1).is_ours
    assert not Credentials(dead.pid, own).is_ours
    # What the kernel reports for a process of a namespace that we cannot see.
    assert not Credentials(0, own).is_ours
    assert not Credentials(-1, own).is_ours


def test_handles_are_shown_by_nothing(caplog: pytest.LogCaptureFixture) -> None:
    handle = MemoryHandle(SECRET)
    allocation = Allocation(4096, SECRET)
    granted = Granted((allocation,))
    shown = [repr(handle), str(handle), repr(allocation), str(granted), f"{granted}"]
    for text in shown:
        assert "\\x01" not in text and SECRET.hex()[:8] not in text
    for copying in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError):
            copying(handle)
    with caplog.at_level(logging.DEBUG):
        server = OfferServer(encode(granted))
        connected, _ = ask(server.endpoint)
        ask(server.endpoint, b"\xc1")[0].close()
        connected.close()
        server.close(5)
    assert caplog.records
    for record in caplog.records:
        assert SECRET not in str(record.__dict__).encode() and "\\x01" not in str(record.__dict__)


def test_rich_shows_no_handle() -> None:
    assert "x01" not in pretty_repr(Granted((Allocation(4096, SECRET),)))
