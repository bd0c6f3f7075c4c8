"""Broken or hostile peers: one clear line, status 2, within the time, never a traceback."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpd.cli import main
from kvpd.cli.inspect.inspection import Inspection
from kvpd.errors import SideChannelError, WireError
from kvpd.vllm.published import decode_payload
from kvpd.vllm.sidechannel import MAX_REPLY_BYTES, Address, ask
from tests.engine_builder import engine
from tests.fake_side_channel import (
    flood,
    listening,
    payload,
    plain_tcp,
    routing,
    stock_fields,
    tagged_fields,
)

TIMEOUT_SECONDS = 1.5
# Of a loaded machine, beside the timeout itself.
GRACE_SECONDS = 8.0
Behaviour = Callable[[socket.socket, threading.Event], None]
STOCK = payload(stock_fields())


def told(capsys: pytest.CaptureFixture[str], address: str) -> str:
    """The line that `inspect` prints about a peer that it cannot use."""
    start = time.monotonic()
    assert main(["inspect", address, "--timeout", str(TIMEOUT_SECONDS)]) == 2
    assert time.monotonic() - start < TIMEOUT_SECONDS + GRACE_SECONDS
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("kvpd: error: ")
    assert shown.err.count("\n") == 1
    return shown.err


def answering(*parts: bytes) -> Callable[[Any, list[bytes]], None]:
    """Send these parts to whoever asks."""

    def answer(router: zmq.Socket[bytes], question: list[bytes]) -> None:
        router.send_multipart([question[0], *parts])

    return answer


# The peak of this process says nothing: the peer is in it, and what ran before has raised it.
# VmHWM is of a program from its start, and what it had held before it asks is held no more.
PROGRAM = """
import re, sys
from pathlib import Path
from kvpd.cli import main

def peak_bytes():
    return 1024 * int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])

address, timeout, ballast_bytes = sys.argv[1:]
main(["inspect", "127.0.0.1:1"])  # what is imported on the way is not the peer's doing
ballast = b"x" * int(ballast_bytes)
del ballast
before = peak_bytes()
status = main(["inspect", address, "--timeout", timeout])
print(peak_bytes() - before)
sys.exit(status)
"""


def told_to_another(
    address: str, *, timeout_seconds: float = TIMEOUT_SECONDS, ballast_bytes: int = 0
) -> tuple[str, int]:
    """What a process of its own is told of a peer, and by how much its peak memory rose.

    Args:
        ballast_bytes: memory that it had held before.
    """
    arguments = [address, str(timeout_seconds), str(ballast_bytes)]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    refused, told = done.stderr.splitlines()
    assert "Connection refused" in refused
    return told, int(done.stdout)


def test_closed_port(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert "Connection refused" in told(capsys, f"127.0.0.1:{port}")


def test_no_such_host(capsys: pytest.CaptureFixture[str]) -> None:
    told(capsys, "no-such-host.invalid:5600")
    told(capsys, "a" * 300 + ":5600")


def greet_then_wait(connection: socket.socket, stop: threading.Event) -> None:
    connection.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48))
    stop.wait(30)


def trickle(connection: socket.socket, stop: threading.Event) -> None:
    for byte in b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48):
        if stop.wait(0.2):
            return
        connection.sendall(bytes([byte]))


def http(connection: socket.socket, stop: threading.Event) -> None:
    connection.recv(64)
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")


def garbage(connection: socket.socket, stop: threading.Event) -> None:
    connection.sendall(bytes(range(256)) * 64)
    stop.wait(30)


@pytest.mark.parametrize(
    ("behave", "message"),
    [
        (lambda connection, stop: stop.wait(30), "no answer within 1.5 s"),
        (lambda connection, stop: None, "does not speak ZeroMQ"),
        (greet_then_wait, "no answer within 1.5 s"),
        (trickle, "no answer within 1.5 s"),
        (http, "does not speak ZeroMQ"),
        (garbage, "does not speak ZeroMQ"),
    ],
    ids=["silence", "hangs-up", "greets", "trickle", "http", "garbage"],
)
def test_not_a_side_channel(
    behave: Behaviour, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with plain_tcp(behave) as address:
        shown = told(capsys, address)
    assert message in shown
    assert "VLLM_NIXL_SIDE_CHANNEL_PORT" in shown


def test_zeromq_that_never_answers(capsys: pytest.CaptureFixture[str]) -> None:
    with routing(lambda router, parts: None) as address:
        shown = told(capsys, address)
    assert "no answer within 1.5 s" in shown
    assert "greeting" not in shown


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([b"", b""], "which is no handshake"),
        ([b""], "which is no handshake"),
        ([b"x", STOCK], "which is no handshake"),
        ([b"", STOCK, *[b"y"] * 100], "answers in 102 parts"),
        ([b"", b"\xc1garbage"], "no MessagePack of vLLM's"),
        ([b"", STOCK[:100]], "no MessagePack of vLLM's"),
        ([b"", STOCK + b"!"], "no MessagePack of vLLM's"),
        ([b"", b"\x91" * 100_000 + b"\xc0"], "not as vLLM publishes it"),
        ([b"", msgspec.msgpack.encode({"compatibility_hash": "x"})], "agent_metadata_bytes"),
        ([b"", payload(stock_fields(block_lens=[1]))], "block_lens has 1 entries for 3"),
        ([b"", payload(stock_fields(block_size=0))], "block_size"),
        ([b"", payload(stock_fields(num_blocks=-1))], "num_blocks"),
        ([b"", payload(stock_fields(kv_caches_base_addr="x"))], "kv_caches_base_addr"),
        ([b"", payload(stock_fields(), digest="d" * 10_000)], "compatibility_hash"),
    ],
    ids=[
        "empty",
        "no-payload",
        "no-delimiter",
        "parts",
        "garbage",
        "truncated",
        "trailing",
        "deep",
        "no-metadata",
        "contradiction",
        "zero",
        "negative",
        "type",
        "long-text",
    ],
)
def test_answers_that_are_no_handshake(
    parts: list[bytes], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with routing(answering(*parts)) as address:
        assert message in told(capsys, address)


def test_a_huge_answer_is_not_taken_in() -> None:
    with routing(answering(b"", bytes(MAX_REPLY_BYTES + 1))) as address:
        shown, grown_bytes = told_to_another(address)
    assert "sent more than 33554432 bytes" in shown
    assert grown_bytes < MAX_REPLY_BYTES // 2


def test_the_largest_answer_is_taken_in() -> None:
    """The bound above is not one that an honest peer could meet."""
    body = bytes(MAX_REPLY_BYTES)
    with routing(answering(b"", body)) as text:
        address = Address.of(text)
        assert address is not None
        assert len(ask(address, 0, timeout_seconds=30)) == MAX_REPLY_BYTES


@pytest.mark.parametrize("ballast", [0, 32], ids=["small", "large-before"])
def test_parts_without_end_are_not_taken_in(ballast: int) -> None:
    """ZeroMQ keeps a message until its last part, and does not bound their number."""
    ballast_bytes = ballast * MAX_REPLY_BYTES
    with plain_tcp(flood) as address:
        start = time.monotonic()
        shown, grown_bytes = told_to_another(
            address, timeout_seconds=60, ballast_bytes=ballast_bytes
        )
        assert time.monotonic() - start < 50
    assert "sends more than 33554432 bytes" in shown
    # Beyond what it had held before: where that was much, the flood must end below it.
    assert grown_bytes < (MAX_REPLY_BYTES if ballast else 32 * MAX_REPLY_BYTES)


def test_the_timeout_is_for_everything_together() -> None:
    with plain_tcp(trickle) as text:
        address = Address.of(text)
        assert address is not None
        start = time.monotonic()
        with pytest.raises(SideChannelError) as caught:
            ask(address, 0, timeout_seconds=0.5)
        assert time.monotonic() - start < 0.5 + GRACE_SECONDS
    assert (caught.value.code, caught.value.field) == ("no-answer", "address")


def test_check_tells_which_engine_cannot_be_asked(capsys: pytest.CaptureFixture[str]) -> None:
    with listening({0: STOCK}) as good, routing(answering(b"", b"?")) as bad:
        assert main(["check", good, bad]) == 2
        assert capsys.readouterr().out == ""
    with listening({0: STOCK}) as good, socket.create_server(("127.0.0.1", 0)) as server:
        silent = f"127.0.0.1:{server.getsockname()[1]}"
        assert main(["check", silent, good, "--timeout", "0.5"]) == 2
        assert silent in capsys.readouterr().err


edits = st.lists(
    st.tuples(st.integers(0, 1 << 20), st.binary(min_size=1, max_size=6)), min_size=1, max_size=4
)
TAGGED = payload(tagged_fields(engine("aiter_shuffle", "LHBNC")))


@given(st.sampled_from([STOCK, TAGGED]), edits)
@settings(max_examples=150, deadline=None)
def test_edited_handshakes_are_shown_or_refused(
    blob: bytes, changes: list[tuple[int, bytes]]
) -> None:
    """Whatever a peer sends is an inspection or a `WireError`, and what is shown can be printed."""
    edited = bytearray(blob)
    for where, new in changes:
        at = where % len(edited)
        edited[at : at + len(new)] = new
    try:
        published = decode_payload(bytes(edited))
    except WireError as error:
        assert error.code
        assert error.field
        return
    assert Inspection.of(published, "somewhere", 0).to_json()


@given(st.binary(max_size=300))
@settings(max_examples=150, deadline=None)
def test_random_bytes(blob: bytes) -> None:
    for candidate in (
        blob,
        msgspec.msgpack.encode({"compatibility_hash": "", "agent_metadata_bytes": blob}),
        payload(stock_fields(kvpd=blob)),
    ):
        try:
            Inspection.of(decode_payload(candidate), "somewhere", 0).to_json()
        except WireError as error:
            assert error.code
