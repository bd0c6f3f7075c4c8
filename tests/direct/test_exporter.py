"""The offer, and requesters that are silent, hostile, or not ours. The driver is a fake."""

from __future__ import annotations

import logging
import os
import pickle
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any, cast

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvpd import Region
from kvpd.direct import DirectError, Exporter, HostIdentity
from kvpd.direct.channel import (
    ANSWER,
    MAX_ALLOCATIONS,
    MAX_ANSWER_BYTES,
    PROTOCOL_VERSION,
    Allocation,
    Answer,
    Denied,
    Granted,
    Request,
    address_of,
    decode,
    encode,
    new_socket,
)
from kvpd.direct.part import RUNTIME
from kvpd.direct.server import OfferServer
from tests.direct.fake_driver import UUIDS, FakeDriver
from tests.waiting import eventually

REQUEST_MESSAGE = encode(Request(UUIDS[1]))
SECRET = bytes(range(64))


@pytest.fixture
def driver() -> Iterator[FakeDriver]:
    made = FakeDriver()
    yield made
    made.free()


def region(address: int, num_bytes: int = 4096, device: int = 0) -> Region:
    return Region(address, 1, num_bytes, num_bytes, memory="vram", device=device)


@pytest.fixture
def exporter(driver: FakeDriver) -> Iterator[Exporter]:
    with Exporter([region(driver.allocate(8192).address)], driver=driver) as made:
        yield made


def connect(endpoint: str) -> socket.socket:
    connected = new_socket()
    connected.settimeout(20)
    connected.connect(address_of(endpoint))
    return connected


def ask(endpoint: str, message: bytes = REQUEST_MESSAGE) -> tuple[socket.socket, Answer]:
    connected = connect(endpoint)
    connected.send(message)
    return connected, decode(connected.recv(MAX_ANSWER_BYTES), ANSWER)


def served(endpoint: str) -> bool:
    connected, answer = ask(endpoint)
    connected.close()
    return isinstance(answer, Granted)


def test_the_part_says_who_and_where_and_no_secret(exporter: Exporter, driver: FakeDriver) -> None:
    part = exporter.part
    assert (part.runtime, part.device_uuid) == (RUNTIME, UUIDS[0])
    assert part.host == HostIdentity.of_this_process()
    (name,) = driver.names.values()
    assert name.encode() not in msgspec.msgpack.encode(part)
    assert name not in repr(part)


def test_every_allocation_once_with_the_handle_that_opens_it(driver: FakeDriver) -> None:
    extents = [driver.allocate(3 * 4096) for _ in range(3)]
    regions = [region(extent.address + 4096 * at) for at in (2, 0, 1) for extent in extents]
    with Exporter(regions, driver=driver) as exporter:
        connected, answer = ask(exporter.part.endpoint)
        assert isinstance(answer, Granted)
        found = {a.base: a.handle.rstrip(b"\0").decode() for a in answer.allocations}
        assert len(answer.allocations) == 3
        assert found == driver.names
        connected.close()


@pytest.mark.parametrize(
    "regions, code",
    [
        ([], "not-one-gpu"),
        ([Region(4096, 1, 64, 64, memory="dram")], "not-one-gpu"),
        ([region(4096), region(8192, device=1)], "not-one-gpu"),
        ([region(16)], "driver"),
    ],
)
def test_memory_that_cannot_be_offered(
    driver: FakeDriver, regions: list[Region], code: str
) -> None:
    with pytest.raises(DirectError) as caught:
        Exporter(regions, driver=driver)
    assert caught.value.code == code


def test_a_region_that_leaves_its_allocation(driver: FakeDriver) -> None:
    extent = driver.allocate(8192)
    Exporter([region(extent.address + 4096)], driver=driver).close()
    with pytest.raises(DirectError) as caught:
        Exporter([region(extent.address + 4097)], driver=driver)
    assert caught.value.code == "outside-allocation"


def test_more_allocations_than_an_answer_holds(driver: FakeDriver) -> None:
    extents = [driver.allocate(4096) for _ in range(MAX_ALLOCATIONS + 1)]
    regions = [region(extent.address) for extent in extents]
    with Exporter(regions[1:], driver=driver) as exporter:
        connected, answer = ask(exporter.part.endpoint)
        assert isinstance(answer, Granted) and len(answer.allocations) == MAX_ALLOCATIONS
        connected.close()
    with pytest.raises(DirectError) as caught:
        Exporter(regions, driver=driver)
    assert caught.value.code == "too-many-allocations"


def test_a_requester_that_comes_while_the_server_is_told_to_end() -> None:
    """The thread is busy with it between the moment of the decision and that of the alarm."""
    server = OfferServer(encode(Granted((Allocation(4096, SECRET),))))
    alarm = server._alarm

    class FakeLateAlarm:
        def send(self, message: bytes) -> None:
            connect(server.endpoint).close()
            time.sleep(0.2)
            alarm.send(message)

        def close(self) -> None:
            alarm.close()

    server._alarm = cast(socket.socket, FakeLateAlarm())
    assert server.close(5) == 0
    assert not server._thread.is_alive()


def test_the_endpoint_is_new_each_time_and_gone_after_close(driver: FakeDriver) -> None:
    regions = [region(driver.allocate(4096).address)]
    first, second = Exporter(regions, driver=driver), Exporter(regions, driver=driver)
    assert first.part.endpoint != second.part.endpoint
    assert first.close() == 0
    with pytest.raises(ConnectionRefusedError):
        connect(first.part.endpoint)
    assert served(second.part.endpoint)
    assert second.close() == first.close() == 0


@pytest.mark.parametrize(
    "message",
    [
        b"\xc1",
        b"x",
        REQUEST_MESSAGE[:-1],
        REQUEST_MESSAGE + b"\0",
        REQUEST_MESSAGE * 100,
        encode(Granted((Allocation(0, SECRET),))),
        msgspec.msgpack.encode({"version": PROTOCOL_VERSION}),
        msgspec.msgpack.encode({"version": PROTOCOL_VERSION, "body": None}),
        b"\x91" * 200,
        pickle.dumps("never read"),
    ],
    ids=lambda message: repr(message[:12]),
)
def test_what_is_no_request_is_denied_and_hung_up_on(exporter: Exporter, message: bytes) -> None:
    connected, answer = ask(exporter.part.endpoint, message)
    assert isinstance(answer, Denied) and answer.code == "malformed"
    assert connected.recv(1) == b""
    assert exporter.num_mapped == 0
    assert served(exporter.part.endpoint)


@pytest.mark.parametrize("version", [0, PROTOCOL_VERSION + 1, 2**63])
def test_another_version_is_an_answer(exporter: Exporter, version: int) -> None:
    message = msgspec.msgpack.encode({"version": version, "body": [b"of another shape"]})
    _, answer = ask(exporter.part.endpoint, message)
    assert isinstance(answer, Denied) and answer.code == "protocol-version"
    assert str(version) in answer.reason and str(PROTOCOL_VERSION) in answer.reason


@given(st.binary(min_size=1, max_size=300))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)
def test_random_requests(exporter: Exporter, message: bytes) -> None:
    connected, answer = ask(exporter.part.endpoint, message)
    assert isinstance(answer, Denied)
    connected.close()


def test_silent_requesters_are_dropped_after_a_while() -> None:
    answer = encode(Granted((Allocation(4096, SECRET),)))
    server = OfferServer(answer, request_timeout_seconds=0.2)
    silent = [connect(server.endpoint) for _ in range(4)]
    assert served(server.endpoint)
    for connected in silent:
        assert connected.recv(1) == b""
    assert served(server.endpoint)
    assert server.close(5) == 0


def test_the_oldest_silent_requester_makes_room_for_another() -> None:
    answer = encode(Granted((Allocation(4096, SECRET),)))
    server = OfferServer(answer, request_timeout_seconds=600, max_requesters=4)
    silent = [connect(server.endpoint) for _ in range(4)]
    assert served(server.endpoint)
    assert silent[0].recv(1) == b""
    for connected in silent[1:]:
        connected.settimeout(0)
        with pytest.raises(BlockingIOError):
            connected.recv(1)
        connected.settimeout(20)
        connected.send(REQUEST_MESSAGE)
        assert isinstance(decode(connected.recv(MAX_ANSWER_BYTES), ANSWER), Granted)
        connected.close()
    assert server.close(5) == 0


def test_a_requester_has_it_mapped_until_it_hangs_up_whatever_it_says(exporter: Exporter) -> None:
    connected, _ = ask(exporter.part.endpoint)
    assert exporter.num_mapped == 1
    connected.send(b"more")
    other, _ = ask(exporter.part.endpoint)  # answered after "more" was heard
    assert exporter.num_mapped == 2
    for mapped in (connected, other):
        mapped.close()
    assert eventually(lambda: exporter.num_mapped == 0)
    connect(exporter.part.endpoint).close()
    empty = connect(exporter.part.endpoint)
    empty.send(b"")
    assert empty.recv(1) == b""
    assert served(exporter.part.endpoint)


def test_a_requester_that_sends_descriptors_gives_us_none(exporter: Exporter) -> None:
    before = len(os.listdir("/proc/self/fd"))
    connected = connect(exporter.part.endpoint)
    socket.send_fds(connected, [REQUEST_MESSAGE], [0, 1, 2])
    assert isinstance(decode(connected.recv(MAX_ANSWER_BYTES), ANSWER), Granted)
    assert len(os.listdir("/proc/self/fd")) == before + 2  # both ends of the connection
    connected.close()


def test_so_many_may_have_it_mapped_and_no_more() -> None:
    server = OfferServer(encode(Granted((Allocation(4096, SECRET),))), max_requesters=2)
    kept = [ask(server.endpoint)[0] for _ in range(2)]
    _, answer = ask(server.endpoint)
    assert isinstance(answer, Denied) and answer.code == "busy"
    kept.pop().close()
    assert eventually(lambda: server.num_mapped == 1)
    assert served(server.endpoint)
    assert server.close(0.05) == 1
    assert kept[0].recv(1) == b""


def test_close_tells_those_who_have_it_mapped_and_waits(exporter: Exporter) -> None:
    connected, _ = ask(exporter.part.endpoint)
    waiting = connect(exporter.part.endpoint)
    began = time.monotonic()
    assert exporter.close(timeout_seconds=0.3) == 1
    assert time.monotonic() - began >= 0.25
    assert connected.recv(1) == b""
    assert waiting.recv(1) == b""
    assert exporter.close(timeout_seconds=60) == 1


REQUESTER = """
import os, socket, sys
os.setgid(65534); os.setuid(65534)
connected = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
connected.connect(b"\\0" + sys.argv[1].encode())
try:
    connected.send(bytes.fromhex(sys.argv[2]))
    answer = connected.recv(100000)
except OSError:
    answer = b""
print(len(answer))
"""


def test_another_user_gets_nothing(exporter: Exporter, caplog: pytest.LogCaptureFixture) -> None:
    if os.geteuid() != 0:
        pytest.skip("NOT ROOT: NO REQUESTER OF ANOTHER USER WAS TRIED")
    command = [sys.executable, "-c", REQUESTER, exporter.part.endpoint, REQUEST_MESSAGE.hex()]
    with caplog.at_level(logging.WARNING):
        done = subprocess.run(command, capture_output=True, text=True, cwd="/")
    assert (done.stdout.strip(), done.stderr) == ("0", "")
    assert "user 65534" in caplog.text
    assert exporter.num_mapped == 0
    assert served(exporter.part.endpoint)


def test_no_socket_no_offer(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(24, "too many open files")

    monkeypatch.setattr("kvpd.direct.server.new_socket", refuse)
    with pytest.raises(DirectError) as caught:
        OfferServer(b"")
    assert caught.value.code == "no-socket"


@pytest.mark.parametrize("found", [PermissionError(13, "denied"), 0, 2**63])
def test_an_identity_that_cannot_be_read(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch, found: Any
) -> None:
    """Nor one that no peer would accept: it would cost the whole handshake."""

    def namespace(_: str) -> int:
        if isinstance(found, OSError):
            raise found
        return int(found)

    monkeypatch.setattr("kvpd.direct.part._namespace", namespace)
    with pytest.raises(DirectError) as caught:
        Exporter([region(driver.allocate(4096).address)], driver=driver)
    assert caught.value.code == "no-identity"
