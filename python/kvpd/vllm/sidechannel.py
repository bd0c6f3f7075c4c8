"""Ask a vLLM engine's NIXL side channel for its handshake, as a decoder does.

The other end is not trusted: how long it may take and how much it may send is bounded. The request
is the one of vLLM 0.30 to 0.33. It must name a rank that the engine has: vLLM's listener ends, for
every later peer too, when it is asked for another one.
"""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kvpd.errors import MissingDependencyError, SideChannelError

if TYPE_CHECKING:
    import zmq

# A tag has up to 8 MiB, NIXL's own metadata comes beside it.
MAX_REPLY_BYTES = 32 << 20
# ZeroMQ bounds the length of a part, not the number of parts, and shows none before the last.
_MAX_GROWTH_BYTES = 8 * MAX_REPLY_BYTES
_MAX_PARTS = 8
_SLICE_SECONDS = 0.05
_NEVER_MS = 1 << 30
_GET_META = b"get_meta_msg"
_HINT = "is it the NIXL side channel (VLLM_NIXL_SIDE_CHANNEL_PORT, by default 5600)?"


@dataclass(frozen=True)
class Address:
    """Where a side channel listens."""

    host: str
    port: int

    @classmethod
    def of(cls, text: str) -> Address | None:
        """Read ``HOST:PORT`` or ``[IPv6]:PORT``; None if it is neither."""
        host, colon, port = text.rpartition(":")
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]
        elif ":" in host:
            return None
        is_port = port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16
        if not (colon and host and is_port) or "/" in host:
            return None
        return cls(host, int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def ask(address: Address, tp_rank: int, *, timeout_seconds: float) -> bytes:
    """The handshake payload of one rank, as the engine encoded it.

    Args:
        address: the engine's side channel.
        tp_rank: a tensor-parallel rank that the engine has.
        timeout_seconds: for everything together but the system's look-up of the name.

    Raises:
        MissingDependencyError: pyzmq is not installed.
        SideChannelError: nobody listens, the answer is late, too large, or none of ZeroMQ's.
    """
    try:
        import zmq
    except ImportError as error:
        raise MissingDependencyError(
            "asking an engine needs pyzmq: pip install 'kvpd[tools]'",
            code="missing-dependency",
            field="zmq",
            got="not installed",
            expected="kvpd[tools]",
        ) from error
    deadline = time.monotonic() + timeout_seconds
    reached = _reached(address, timeout_seconds)
    context = zmq.Context()
    try:
        return _exchange(context, address, reached, tp_rank, deadline, timeout_seconds)
    except zmq.ZMQError as error:
        raise _error(address, "transport", str(error), _HINT) from error
    finally:
        context.destroy(linger=0)


def _reached(address: Address, timeout_seconds: float) -> Address:
    """The one of the host's addresses where somebody listens.

    The system says why nobody can be reached; ZeroMQ would only go on trying, and of a name's
    several addresses it takes one.
    """
    try:
        with socket.create_connection((address.host, address.port), timeout_seconds) as probe:
            return Address(probe.getpeername()[0], address.port)
    except (OSError, UnicodeError) as error:
        if isinstance(error, TimeoutError):
            why = f"no connection within {timeout_seconds:g} s"
        else:
            why = getattr(error, "strerror", None) or str(error)
        raise _error(
            address, "unreachable", why, "is the engine up, and is this its address?"
        ) from error


def _exchange(
    context: zmq.Context[zmq.Socket[bytes]],
    address: Address,
    reached: Address,
    tp_rank: int,
    deadline: float,
    timeout_seconds: float,
) -> bytes:
    import zmq

    # Not REQ: that drops what is not framed as an answer, and the peer would seem silent.
    peer = context.socket(zmq.DEALER)
    peer.setsockopt(zmq.MAXMSGSIZE, MAX_REPLY_BYTES)
    # Once is enough. Forbidden to reconnect at all, libzmq can block in `send` and for ever in
    # `term` after a peer that hangs up early.
    peer.setsockopt(zmq.RECONNECT_IVL, _NEVER_MS)
    peer.setsockopt(zmq.SNDTIMEO, int(1000 * timeout_seconds))
    peer.setsockopt(zmq.IPV6, int(":" in reached.host))
    events = peer.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
    peer.connect(f"tcp://{reached}")
    peer.send_multipart([b"", msgspec.msgpack.encode((_GET_META, 0, tp_rank))])
    poller = zmq.Poller()
    poller.register(peer, zmq.POLLIN)
    poller.register(events, zmq.POLLIN)
    start_bytes = _resident_bytes()
    speaks_zeromq = False
    while (left := deadline - time.monotonic()) > 0:
        ready = dict(poller.poll(1 + int(1000 * min(left, _SLICE_SECONDS))))
        if peer in ready:
            return _payload(address, peer.recv_multipart())
        if _resident_bytes() - start_bytes > _MAX_GROWTH_BYTES:
            raise _error(address, "oversized", f"sends more than {MAX_REPLY_BYTES} bytes", _HINT)
        if events in ready:
            event = int.from_bytes(events.recv_multipart()[0][:2], "little")
            if event == zmq.EVENT_DISCONNECTED:
                if not speaks_zeromq:
                    raise _error(address, "not-zeromq", "does not speak ZeroMQ", _HINT)
                why = f"closed the connection, or sent more than {MAX_REPLY_BYTES} bytes"
                raise _error(address, "disconnected", why, _HINT)
            speaks_zeromq = True
    why = f"no answer within {timeout_seconds:g} s"
    if not speaks_zeromq:
        why += ", and no greeting of ZeroMQ's"
    raise _error(address, "no-answer", why, _HINT)


def _payload(address: Address, parts: list[bytes]) -> bytes:
    """The first part after the empty one that frames an answer; the others are vLLM's clock."""
    if not 2 <= len(parts) <= _MAX_PARTS or parts[0] or not parts[1]:
        sizes = ", ".join(str(len(part)) for part in parts[:_MAX_PARTS])
        why = f"answers in {len(parts)} parts of {sizes} bytes, which is no handshake"
        raise _error(address, "malformed-reply", why, _HINT)
    return parts[1]


def _resident_bytes() -> int:
    # Not the peak: a process that was large once could grow up to there again unseen.
    resident = Path("/proc/self/statm").read_text().split()[1]
    return int(resident) * os.sysconf("SC_PAGE_SIZE")


def _error(address: Address, code: str, why: str, hint: str) -> SideChannelError:
    return SideChannelError(
        f"{address}: {why}; {hint}", code=code, field="address", got=why, expected="a handshake"
    )
