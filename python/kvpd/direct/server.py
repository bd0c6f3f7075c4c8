"""The exporter's end of the channel: one thread, bounded in everything a requester can ask for."""

from __future__ import annotations

import logging
import secrets
import selectors
import socket
import threading
import time
from dataclasses import dataclass
from functools import partial

from kvpd.direct.channel import (
    MAX_REQUEST_BYTES,
    REQUEST,
    Denied,
    address_of,
    credentials,
    decode,
    encode,
    kept_from_children,
    new_socket,
)
from kvpd.errors import DirectError

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Requester:
    """A connection; `is_mapped` from the moment it was sent the handles until it hung up."""

    connection: socket.socket
    pid: int
    give_up_at: float
    is_mapped: bool = False


class OfferServer:
    """Gives `answer` to processes of our user on this host.

    Whoever is not of our user is hung up on unanswered. A connection that asks nothing is dropped
    after `request_timeout_seconds`, or when `max_requesters` others that ask nothing have come
    after it. Nothing a requester sends or leaves unread makes the thread wait. `max_requesters` may
    have the memory mapped at a time.

    Raises:
        DirectError: no socket can be had.
    """

    def __init__(
        self, answer: bytes, *, request_timeout_seconds: float = 5.0, max_requesters: int = 64
    ) -> None:
        self.endpoint = f"kvpd-direct-{secrets.token_hex(16)}"
        self._answer = answer
        self._request_timeout_seconds = request_timeout_seconds
        self._max_requesters = max_requesters
        self._requesters: dict[socket.socket, _Requester] = {}
        self._num_mapped = 0
        # Set by the caller of `close`, and taken over by the thread when it hears the alarm.
        self._close_by: float | None = None
        self._give_up_at: float | None = None
        try:
            self._listener = new_socket()
            self._listener.setblocking(False)
            self._listener.bind(address_of(self.endpoint))
            self._listener.listen(max_requesters)
            self._alarm, self._alarmed = (kept_from_children(s) for s in socket.socketpair())
        except OSError as error:
            raise DirectError(
                f"no socket for the offer: {error}", code="no-socket", field="endpoint", got=error
            ) from error
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._alarmed, selectors.EVENT_READ, self._begin_to_close)
        # A daemon: an engine that dies without closing must not hang on its way out.
        self._thread = threading.Thread(target=self._run, name="kvpd-direct", daemon=True)
        self._thread.start()

    @property
    def num_mapped(self) -> int:
        """Requesters that were given the handles and have not hung up."""
        return self._num_mapped

    def close(self, timeout_seconds: float) -> int:
        """Stop offering, tell requesters, and wait for them to unmap; idempotent.

        Returns:
            Requesters that had not hung up after `timeout_seconds`.
        """
        if self._close_by is None:
            self._close_by = time.monotonic() + timeout_seconds
            self._alarm.send(b"\0")
            self._thread.join()
            self._alarm.close()
        return self._num_mapped

    def _run(self) -> None:
        while self._give_up_at is None or (
            self._num_mapped and time.monotonic() < self._give_up_at
        ):
            for key, _ in self._selector.select(self._seconds_to_wait()):
                key.data()
            now = time.monotonic()
            for requester in list(self._requesters.values()):
                if not requester.is_mapped and requester.give_up_at <= now:
                    self._drop(requester)
        self._selector.close()
        for own in (self._listener, self._alarmed, *self._requesters):
            own.close()

    def _seconds_to_wait(self) -> float | None:
        moments = [r.give_up_at for r in self._requesters.values() if not r.is_mapped]
        if self._give_up_at is not None:
            moments.append(self._give_up_at)
        return max(0.0, min(moments) - time.monotonic()) if moments else None

    def _begin_to_close(self) -> None:
        self._give_up_at = self._close_by
        for own in (self._alarmed, self._listener):
            self._selector.unregister(own)
            own.close()
        for requester in list(self._requesters.values()):
            if requester.is_mapped:
                # Half-closed: it reads that we are leaving, we read when it has unmapped.
                requester.connection.shutdown(socket.SHUT_WR)
            else:
                self._drop(requester)

    def _accept(self) -> None:
        if self._listener.fileno() < 0:
            return  # closed by an earlier event of the same round
        try:
            connection = kept_from_children(self._listener.accept()[0])
        except OSError as error:
            if not isinstance(error, BlockingIOError):
                logger.warning("direct: a requester could not be accepted: %s", error)
                time.sleep(0.05)  # out of descriptors: the listener stays readable
            return
        connection.setblocking(False)
        try:
            who = credentials(connection)
        except OSError:
            connection.close()
            return
        if not who.is_ours:
            logger.warning("direct: hung up on pid %d of user %d", who.pid, who.uid)
            connection.close()
            return
        silent = [r for r in self._requesters.values() if not r.is_mapped]
        if len(silent) >= self._max_requesters:
            self._drop(silent[0])
        give_up_at = time.monotonic() + self._request_timeout_seconds
        requester = _Requester(connection, who.pid, give_up_at)
        self._requesters[connection] = requester
        self._selector.register(connection, selectors.EVENT_READ, partial(self._hear, requester))

    def _hear(self, requester: _Requester) -> None:
        if requester.connection.fileno() < 0:
            return  # dropped by an earlier event of the same round
        try:
            message = requester.connection.recv(MAX_REQUEST_BYTES)
        except BlockingIOError:
            return
        except OSError:
            message = b""
        if not message:
            self._drop(requester)
            return
        if requester.is_mapped:
            # There is one request. What it has mapped it has until it hangs up.
            logger.warning("direct: pid %d says more than it may", requester.pid)
            return
        # Denied only here: closed with its request unread, a requester would not see the reason.
        try:
            request = decode(message, REQUEST)
        except DirectError as error:
            self._deny(requester, error.code, str(error))
            return
        if self._num_mapped >= self._max_requesters:
            self._deny(requester, "busy", f"{self._num_mapped} requesters have it mapped already")
            return
        # Counted before it can map anything: who closes meanwhile must wait for it.
        requester.is_mapped = True
        self._num_mapped += 1
        if not _send(requester.connection, self._answer):
            self._drop(requester)
            return
        logger.info("direct: pid %d maps our pages on %s", requester.pid, request.device_uuid)

    def _deny(self, requester: _Requester, code: str, reason: str) -> None:
        logger.warning("direct: pid %d is denied: %s", requester.pid, reason)
        _send(requester.connection, encode(Denied(code, reason[:256])))
        self._drop(requester)

    def _drop(self, requester: _Requester) -> None:
        del self._requesters[requester.connection]
        self._selector.unregister(requester.connection)
        requester.connection.close()
        if requester.is_mapped:
            self._num_mapped -= 1
            logger.info("direct: pid %d has let go of our pages", requester.pid)


def _send(connection: socket.socket, message: bytes) -> bool:
    """Whether one message went out; a requester that does not take it at once gets none."""
    try:
        connection.send(message)
    except OSError:
        return False
    return True
