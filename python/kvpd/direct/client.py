"""The requester's end of the channel."""

from __future__ import annotations

import os
import socket
import struct
from contextlib import suppress
from typing import TYPE_CHECKING

from kvpd.direct.channel import (
    ANSWER,
    MAX_ANSWER_BYTES,
    Allocation,
    Denied,
    Request,
    address_of,
    credentials,
    decode,
    encode,
    new_socket,
)
from kvpd.errors import DirectError

if TYPE_CHECKING:
    from kvpd.direct.part import DirectPart


# Joined once: of a flag enum that takes as long as the call.
_LOOK = int(socket.MSG_PEEK | socket.MSG_DONTWAIT)


class Connection:
    """To an exporter, open for as long as anything of it is mapped."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected

    def is_open(self) -> bool:
        """Whether the exporter still offers; it says nothing more, so anything else is its end."""
        try:
            self._socket.recv(1, _LOOK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def close(self) -> None:
        """Tell the exporter that nothing of it is mapped any more; idempotent."""
        with suppress(OSError):
            # A child process that was forked meanwhile may hold the socket open too.
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def fetch(
    part: DirectPart, device_uuid: str, *, timeout_seconds: float
) -> tuple[Connection, tuple[Allocation, ...]]:
    """Ask the exporter for its allocations.

    Raises:
        DirectError: it cannot be reached in time, is not the process that published the offer,
            denies it, or says what is no answer.
    """
    connected = new_socket()
    try:
        _limit(connected, timeout_seconds)
        connected.connect(address_of(part.endpoint))
        _check_exporter(connected, part)
        connected.send(encode(Request(device_uuid)))
        message = connected.recv(MAX_ANSWER_BYTES)
        allocations = _read(message)
    except OSError as error:
        connected.close()
        late = isinstance(error, BlockingIOError)
        raise DirectError(
            f"the exporter does not answer: {error}",
            code="timeout" if late else "unreachable",
            field="endpoint",
            got=error,
            expected=f"an answer in {timeout_seconds} s",
        ) from error
    except DirectError:
        connected.close()
        raise
    return Connection(connected), allocations


def _limit(connection: socket.socket, timeout_seconds: float) -> None:
    """Let the kernel end what blocks for longer.

    Python's own timeouts connect without blocking, and then a queue that is full for a moment is an
    error at once.
    """
    whole = int(timeout_seconds)
    limit = struct.pack("ll", whole, int((timeout_seconds - whole) * 1e6))
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connection.setsockopt(socket.SOL_SOCKET, option, limit)


def _check_exporter(connected: socket.socket, part: DirectPart) -> None:
    # The name of a dead exporter's socket is free for anybody who read it.
    who = credentials(connected)
    if who.pid != part.host.pid or who.uid != os.geteuid():
        raise DirectError(
            f"the endpoint belongs to pid {who.pid} of user {who.uid}, "
            f"the offer to pid {part.host.pid} and must be of user {os.geteuid()}",
            code="wrong-exporter",
            field="endpoint",
            got=f"pid {who.pid}, user {who.uid}",
            expected=f"pid {part.host.pid}, user {os.geteuid()}",
        )


def _read(message: bytes) -> tuple[Allocation, ...]:
    if not message:
        raise DirectError(
            "the exporter hung up: it serves only live processes of its own user",
            code="denied",
            field="endpoint",
            got="end of the connection",
            expected="an answer",
        )
    answer = decode(message, ANSWER)
    if isinstance(answer, Denied):
        raise DirectError(
            f"the exporter denies it: {answer.reason}",
            code="denied",
            field="endpoint",
            got=answer.code,
            expected="granted",
        )
    return answer.allocations
