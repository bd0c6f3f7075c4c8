"""What is said over an exporter's socket, and who is at its other end.

The socket keeps message boundaries (SOCK_SEQPACKET): a requester sends one `Request` and gets one
answer, `Granted` or `Denied`. The connection then stays open for as long as the requester has
anything mapped; its end is how either side learns that the other is gone.

Each message is an envelope, version first, around a body that is read only if the version is ours.
"""

from __future__ import annotations

import os
import socket
import struct
from dataclasses import dataclass
from typing import Annotated, Any, Final, TypeVar
from weakref import WeakSet

import msgspec

from kvpd.direct.driver import HANDLE_BYTES
from kvpd.direct.part import DeviceUuid
from kvpd.errors import DirectError

PROTOCOL_VERSION: Final = 1
MAX_REQUEST_BYTES: Final = 256
# An answer is one datagram, which the kernel's default socket buffer must hold.
MAX_ANSWER_BYTES: Final = 128 << 10
MAX_ALLOCATIONS: Final = 1024

_CREDENTIALS = struct.Struct("iII")  # struct ucred: pid, uid, gid


class Request(msgspec.Struct, frozen=True):
    """Asks for everything that is offered, to be read by kernels of one GPU."""

    device_uuid: DeviceUuid


class Allocation(msgspec.Struct, frozen=True):
    """One allocation: where it begins in the exporter, and the handle that opens it."""

    base: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    handle: Annotated[bytes, msgspec.Meta(min_length=HANDLE_BYTES, max_length=HANDLE_BYTES)]

    def __repr__(self) -> str:
        return f"Allocation(base={self.base:#x})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return [("base", self.base)]


class Granted(msgspec.Struct, frozen=True, tag="granted"):
    """The offer."""

    allocations: Annotated[
        tuple[Allocation, ...], msgspec.Meta(min_length=1, max_length=MAX_ALLOCATIONS)
    ]


class Denied(msgspec.Struct, frozen=True, tag="denied"):
    """A reason, for the requester to show."""

    code: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    reason: Annotated[str, msgspec.Meta(max_length=256)]


Answer = Granted | Denied


class _Envelope(msgspec.Struct, frozen=True):
    version: int
    body: msgspec.Raw = msgspec.Raw()


def encode(body: Request | Answer) -> bytes:
    """A message of our version."""
    raw = msgspec.Raw(msgspec.msgpack.encode(body))
    return msgspec.msgpack.encode(_Envelope(PROTOCOL_VERSION, raw))


_Body = TypeVar("_Body")
REQUEST: Final = msgspec.msgpack.Decoder(Request)
ANSWER: Final[msgspec.msgpack.Decoder[Answer]] = msgspec.msgpack.Decoder(Answer)


def decode(message: bytes, body: msgspec.msgpack.Decoder[_Body]) -> _Body:
    """Read a message of the other side, `REQUEST` or `ANSWER`.

    Raises:
        DirectError: "protocol-version", or "malformed".
    """
    try:
        envelope = msgspec.msgpack.decode(message, type=_Envelope)
        if envelope.version != PROTOCOL_VERSION:
            raise DirectError(
                f"the other side speaks version {envelope.version} of the direct protocol, this is "
                f"{PROTOCOL_VERSION}; run the same kvpd release on both sides",
                code="protocol-version",
                field="version",
                got=envelope.version,
                expected=PROTOCOL_VERSION,
            )
        return body.decode(bytes(envelope.body))
    except (msgspec.DecodeError, RecursionError) as error:
        # The decoder names the field; it never quotes what it found there.
        raise DirectError(
            f"not a message of the direct protocol: {error}", code="malformed", field="message"
        ) from error


@dataclass(frozen=True)
class Credentials:
    """Who connected or listened, as the kernel saw it then."""

    pid: int
    uid: int

    @property
    def is_ours(self) -> bool:
        """Whether this is a live process of our user that our pid namespace can name."""
        # 0 is a process of a namespace that we cannot see into; kill(0, 0) would always succeed.
        if self.uid != os.geteuid() or self.pid <= 0:
            return False
        try:
            os.kill(self.pid, 0)
        except OSError:
            return False
        return True


def credentials(connection: socket.socket) -> Credentials:
    """The other end's (SO_PEERCRED). Raises `OSError`."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return Credentials(pid, uid)


def new_socket() -> socket.socket:
    """A socket of the channel's kind; not inherited by programs we start."""
    return kept_from_children(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))


def kept_from_children(own: socket.socket) -> socket.socket:
    """`own`, whose copies in processes that fork from this one are closed.

    A copy would outlive this process: the other end would take a dead exporter for one that offers,
    and go on reading memory that is nobody's.
    """
    _sockets.add(own)
    return own


_sockets: WeakSet[socket.socket] = WeakSet()


def _close_copies() -> None:
    for copy in list(_sockets):
        copy.close()


os.register_at_fork(after_in_child=_close_copies)


def address_of(endpoint: str) -> bytes:
    """The endpoint's address: a name without a file, gone with the last socket that has it."""
    return b"\0" + endpoint.encode()
