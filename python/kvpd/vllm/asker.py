"""Asks the owners of blocks whether they still hold them; a thread of its own, so nobody waits.

Crossings: the engine's thread puts questions into one queue and wakes the thread through an event
descriptor; the thread puts answers into another. Each queue has one writer and one reader, nothing
else is shared. The thread starts with the first question and sleeps while nothing is asked.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import msgspec
import zmq

from kvpd.request import NotHeld
from kvpd.vllm.config import MAX_HELD_TIMEOUT_SECONDS
from kvpd.vllm.held import Answer, Question, Reply
from kvpd.vllm.sidechannel import Address

logger = logging.getLogger("vllm.kvpd")

# Questions that have no answer yet; more are put off, not dropped.
MAX_PENDING = 4096
# Connections that are kept; one that nobody uses is closed after a while.
MAX_CONNECTIONS = 64
IDLE_SECONDS = 2 * MAX_HELD_TIMEOUT_SECONDS
# The engine's thread gives up by itself this much later: the asking thread may have died.
_GRACE_SECONDS = 1.0
_MAX_REPLY_BYTES = 64
_NUM_REPLIES_A_TURN = 64


@dataclass
class _Asked:
    """A question, as the engine's thread knows it."""

    number: int
    give_up_at: float
    answer: Answer | None = None
    has_ended: bool = False


@dataclass(frozen=True)
class _Pending:
    """A question, as the asking thread knows it."""

    address: Address
    message: bytes
    give_up_at: float


@dataclass
class _Connection:
    socket: zmq.Socket[bytes]
    used_at: float


@dataclass
class Inquiry:
    """What is asked about one request.

    Attributes:
        address: the owner's side channel, as the handshake found it.
        question: its number is chosen when it is asked.
        takes_released: a READ carries the only notice that this agent sends for these blocks, so
            that "released by it" is as good as "held".
    """

    address: Address
    question: Question
    takes_released: bool = False


class Asker:
    """Questions of one worker. `is_held` and `forget` are for one thread, the engine's.

    Args:
        timeout_seconds: for one answer, from when it is first asked for.
        clock: seconds.
    """

    def __init__(self, timeout_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._timeout_seconds = timeout_seconds
        self._clock = clock
        self._asked: dict[str, _Asked] = {}
        self._numbers: dict[int, str] = {}
        self._questions: deque[tuple[int, _Pending]] = deque()
        self._answers: deque[tuple[int, Answer | None]] = deque()
        self._wake = -1
        self._thread: threading.Thread | None = None
        self._is_closed = threading.Event()

    def is_held(self, key: str, inquiry: Inquiry) -> Literal["held"] | NotHeld | None:
        """Whether blocks are still held: asked with the first call, None until there is an answer.

        Args:
            key: whose question it is; once it has its answer, the next call asks anew.
            inquiry: made after the last byte was read, or the answer proves nothing.
        """
        self._collect()
        asked = self._asked.get(key)
        if asked is None:
            self._ask(key, inquiry)
            return None
        if not asked.has_ended and self._clock() < asked.give_up_at + _GRACE_SECONDS:
            return None
        self.forget(key)
        if asked.answer is None:
            return NotHeld(
                "held-unanswered",
                f"the prefill's side channel {inquiry.address} did not say within "
                f"{self._timeout_seconds:g} s whether it still held the blocks; is it reachable? "
                "held_timeout_seconds is how long an answer may take",
            )
        taken = (Answer.HELD, Answer.RELEASED) if inquiry.takes_released else (Answer.HELD,)
        if asked.answer in taken:
            return "held"
        return NotHeld(
            "not-held",
            f"the prefill {inquiry.address} no longer held the blocks when they had been read: "
            "another request had given them back, their lease had ended, the prefill had been "
            "restarted, or kv_transfer_params are not as it returned them; every request needs a "
            "prefill of its own, and both sides the same kv_lease_duration",
        )

    def forget(self, key: str) -> None:
        """Nobody wants this answer any more. Idempotent."""
        asked = self._asked.pop(key, None)
        if asked is not None:
            self._numbers.pop(asked.number, None)

    def close(self) -> None:
        """End the thread; questions stay unanswered. Idempotent."""
        self._is_closed.set()
        if self._thread is not None:
            self._wake_up()
            self._thread.join()
            self._thread = None
        if self._wake >= 0:
            os.close(self._wake)
            self._wake = -1

    # ------------------------------------------------------------------ the engine's thread

    def _ask(self, key: str, inquiry: Inquiry) -> None:
        if len(self._asked) >= MAX_PENDING and not self._is_closed.is_set():
            # Later is as good: the last byte was read before.
            return
        # Not one that follows from another: whoever cannot read questions cannot answer them.
        number = secrets.randbits(63)
        give_up_at = self._clock() + self._timeout_seconds
        asked = self._asked[key] = _Asked(number, give_up_at, has_ended=self._is_closed.is_set())
        self._numbers[number] = key
        if asked.has_ended:
            return
        if self._wake < 0:
            self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        if self._thread is None or not self._thread.is_alive():
            # The first question, or the first one after an error that ended the thread.
            self._thread = threading.Thread(target=self._run, name="kvpd-asker", daemon=True)
            self._thread.start()
        message = msgspec.structs.replace(inquiry.question, number=number).encode()
        self._questions.append((number, _Pending(inquiry.address, message, give_up_at)))
        self._wake_up()

    def _collect(self) -> None:
        while self._answers:
            number, answer = self._answers.popleft()
            key = self._numbers.pop(number, None)
            if key is not None:
                asked = self._asked[key]
                asked.answer, asked.has_ended = answer, True

    def _wake_up(self) -> None:
        os.eventfd_write(self._wake, 1)

    # ------------------------------------------------------------------ the asking thread

    def _run(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            turns = _Turns(context, self._wake, self._questions, self._answers, self._clock)
            while not self._is_closed.is_set():
                try:
                    turns.take()
                except Exception:
                    logger.exception("an error while owners of blocks were asked")
                    turns.give_up()
            turns.give_up()
        finally:
            context.destroy(linger=0)


class _Turns:
    """What the asking thread knows; nobody else touches it."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        wake: int,
        questions: deque[tuple[int, _Pending]],
        answers: deque[tuple[int, Answer | None]],
        clock: Callable[[], float],
    ) -> None:
        self._context = context
        self._wake = wake
        self._questions = questions
        self._answers = answers
        self._clock = clock
        self._pending: OrderedDict[int, _Pending] = OrderedDict()
        # The one that was not used for longest comes first.
        self._connections: OrderedDict[Address, _Connection] = OrderedDict()
        self._poller = zmq.Poller()
        self._poller.register(wake, zmq.POLLIN)

    def take(self) -> None:
        """Wait until there is something to do, and do it."""
        ready = dict(self._poller.poll(self._wait_ms()))
        if self._wake in ready:
            os.eventfd_read(self._wake)
        while self._questions:
            number, question = self._questions.popleft()
            self._pending[number] = question
            self._send(number)
        for address, connection in list(self._connections.items()):
            if connection.socket in ready:
                self._receive(address, connection)
        now = self._clock()
        while self._pending:
            number, question = next(iter(self._pending.items()))
            if now < question.give_up_at:
                break
            self._end(number, None)
            # It may be a connection that carries nothing any more. The others ask again.
            self._drop(question.address)
            for other in [n for n, q in self._pending.items() if q.address == question.address]:
                self._send(other)
        while self._connections:
            address, connection = next(iter(self._connections.items()))
            if now < connection.used_at + IDLE_SECONDS or self._is_awaited(address):
                break
            self._drop(address)

    def give_up(self) -> None:
        """Let everything go; what was asked has no answer."""
        for number in list(self._pending):
            self._end(number, None)
        for address in list(self._connections):
            self._drop(address)

    def _wait_ms(self) -> int | None:
        times = [q.give_up_at for q in self._pending.values()][:1]
        times += [c.used_at + IDLE_SECONDS for c in list(self._connections.values())[:1]]
        if not times:
            return None
        return 1 + int(1000 * max(0.0, min(times) - self._clock()))

    def _send(self, number: int) -> None:
        question = self._pending[number]
        try:
            connection = self._connection(question.address)
            connection.socket.send_multipart([b"", question.message], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            logger.debug("%s cannot be asked: %s", question.address, error)
            self._end(number, None)

    def _receive(self, address: Address, connection: _Connection) -> None:
        for _ in range(_NUM_REPLIES_A_TURN):
            try:
                parts = connection.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            reply = Reply.decode(parts[1]) if len(parts) == 2 and not parts[0] else None
            question = None if reply is None else self._pending.get(reply.number)
            if reply is None or question is None or question.address != address:
                # It would have to be read for as long as it goes on.
                logger.warning("%s says what it was not asked; it is not listened to", address)
                self._drop(address)
                for number in [n for n, q in self._pending.items() if q.address == address]:
                    self._end(number, None)
                return
            self._end(reply.number, reply.answer)

    def _connection(self, address: Address) -> _Connection:
        connection = self._connections.pop(address, None)
        if connection is None:
            if len(self._connections) >= MAX_CONNECTIONS:
                self._drop_unused()
            connection = _Connection(self._connected(address), self._clock())
        connection.used_at = self._clock()
        self._connections[address] = connection
        return connection

    def _connected(self, address: Address) -> zmq.Socket[bytes]:
        # Not REQ: that takes one question at a time.
        peer = self._context.socket(zmq.DEALER)
        try:
            peer.setsockopt(zmq.LINGER, 0)
            peer.setsockopt(zmq.MAXMSGSIZE, _MAX_REPLY_BYTES)
            peer.setsockopt(zmq.IPV6, int(":" in address.host))
            peer.connect(f"tcp://{address}")
        except BaseException:
            peer.close(linger=0)
            raise
        self._poller.register(peer, zmq.POLLIN)
        return peer

    def _drop(self, address: Address) -> None:
        connection = self._connections.pop(address, None)
        if connection is not None:
            self._poller.unregister(connection.socket)
            connection.socket.close(linger=0)

    def _drop_unused(self) -> None:
        for address in self._connections:
            if not self._is_awaited(address):
                self._drop(address)
                return

    def _is_awaited(self, address: Address) -> bool:
        return any(question.address == address for question in self._pending.values())

    def _end(self, number: int, answer: Answer | None) -> None:
        if self._pending.pop(number, None) is not None:
            self._answers.append((number, answer))
