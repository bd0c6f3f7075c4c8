"""The thread that asks owners: silent, wrong and hostile ones on real sockets. Needs no vLLM."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
import zmq

from kvpd.request import NotHeld
from kvpd.vllm import asker as asker_module
from kvpd.vllm.asker import Asker, Inquiry
from kvpd.vllm.held import WHAT, Answer, Question, Reply, new_id
from kvpd.vllm.sidechannel import Address

SECONDS = 0.4
# What an owner sends for a question that came.
Says = Callable[[Question], list[list[bytes]]]


def says(answer: Answer) -> Says:
    return lambda question: [[b"", Reply(question.number, answer).encode()]]


@contextmanager
def owner(says: Says, host: str = "127.0.0.1") -> Iterator[tuple[Address, list[Question]]]:
    """A fake side channel; a real one decodes and frames in the same way (test_held.py)."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    channel = context.socket(zmq.ROUTER)
    channel.setsockopt(zmq.IPV6, int(":" in host))
    channel.setsockopt(zmq.RCVTIMEO, 20)
    port = channel.bind_to_random_port(f"tcp://[{host}]" if ":" in host else f"tcp://{host}")
    came: list[Question] = []
    stop = threading.Event()

    def serve() -> None:
        while not stop.is_set():
            try:
                identity, frame, message = channel.recv_multipart()
            except zmq.Again:
                continue
            question = Question.decode(message)
            assert question is not None and frame == b""
            came.append(question)
            for parts in says(question):
                channel.send_multipart([identity, *parts])

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield Address(host, port), came
    finally:
        stop.set()
        thread.join()
        context.destroy(linger=0)


@pytest.fixture
def asker() -> Iterator[Asker]:
    asker = Asker(SECONDS)
    yield asker
    asker.close()


def inquiry(address: Address, *, takes_released: bool = False) -> Inquiry:
    question = Question(WHAT, 0, (new_id(),), new_id(), new_id() + new_id(), new_id())
    return Inquiry(address, question, takes_released)


def outcome(asker: Asker, asked: Inquiry, key: str = "request") -> Any:
    give_up_at = time.monotonic() + 10
    while (found := asker.is_held(key, asked)) is None:
        assert time.monotonic() < give_up_at
        time.sleep(0.001)
    return found.code if isinstance(found, NotHeld) else found


@pytest.mark.parametrize(
    ("answer", "takes_released", "expected"),
    [
        (Answer.HELD, False, "held"),
        (Answer.HELD, True, "held"),
        (Answer.RELEASED, False, "not-held"),
        (Answer.RELEASED, True, "held"),
        (Answer.GONE, False, "not-held"),
        (Answer.GONE, True, "not-held"),
    ],
)
def test_answers(asker: Asker, answer: Answer, takes_released: bool, expected: str) -> None:
    with owner(says(answer)) as (address, came):
        asked = inquiry(address, takes_released=takes_released)
        assert outcome(asker, asked) == expected
    assert [msgspec.structs.replace(q, number=0) for q in came] == [asked.question]


def test_ipv6(asker: Asker) -> None:
    try:
        with owner(says(Answer.HELD), "::1") as (address, _):
            assert outcome(asker, inquiry(address)) == "held"
    except zmq.ZMQError:
        pytest.skip("no IPv6 on the loopback")


def test_an_owner_that_is_not_there_or_says_nothing(asker: Asker) -> None:
    with socket.socket() as silent, owner(lambda question: []) as (mute, _):
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            nobody = Address("127.0.0.1", closed.getsockname()[1])
        began = time.monotonic()
        for address in (mute, nobody, Address("127.0.0.1", silent.getsockname()[1])):
            assert outcome(asker, inquiry(address), str(address)) == "held-unanswered"
    assert time.monotonic() - began < 3 * SECONDS + 2


def test_an_address_that_is_none(asker: Asker) -> None:
    for host in ("no such host", "1.2.3.4;tcp", "", "x" * 300):
        assert outcome(asker, inquiry(Address(host, 1))) == "held-unanswered"


WRONG: dict[str, Says] = {
    "another number": lambda q: [[b"", Reply(q.number ^ 1, Answer.HELD).encode()]],
    "no frame": lambda q: [[Reply(q.number, Answer.HELD).encode()]],
    "nothing": lambda q: [[b"", b""]],
    "an unknown answer": lambda q: [[b"", msgspec.msgpack.encode([q.number, 3])]],
    "true": lambda q: [[b"", msgspec.msgpack.encode([q.number, True])]],
    "its question": lambda q: [[b"", q.encode()]],
    "too long": lambda q: [[b"", Reply(q.number, Answer.HELD).encode() + bytes(200)]],
    "trailing bytes": lambda q: [[b"", Reply(q.number, Answer.HELD).encode() + b"x"]],
    "many parts": lambda q: [[b"", Reply(q.number, Answer.HELD).encode(), *[b"x"] * 5000]],
    "a handshake": lambda q: [[b"", b"\x82\xa1a", b"\x01"]],
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_answer(asker: Asker, name: str) -> None:
    with owner(WRONG[name]) as (address, _):
        assert outcome(asker, inquiry(address)) == "held-unanswered"
    with owner(says(Answer.HELD)) as (address, _):
        assert outcome(asker, inquiry(address)) == "held"


def test_a_second_answer_changes_nothing(asker: Asker) -> None:
    def twice(question: Question) -> list[list[bytes]]:
        answers = (Answer.GONE, Answer.HELD)
        return [[b"", Reply(question.number, answer).encode()] for answer in answers]

    with owner(twice) as (address, _):
        assert outcome(asker, inquiry(address)) == "not-held"
        # The connection over which it came may have been given up; a new one is made.
        assert outcome(asker, inquiry(address)) in ("not-held", "held-unanswered")


def test_a_flood_is_not_listened_to(asker: Asker) -> None:
    def flood(question: Question) -> list[list[bytes]]:
        return [[b"", Reply(number, Answer.HELD).encode()] for number in range(20_000)]

    with owner(flood) as (hostile, _), owner(says(Answer.HELD)) as (address, _):
        asker.is_held("flooded", inquiry(hostile))
        assert outcome(asker, inquiry(address)) == "held"
        assert outcome(asker, inquiry(hostile), "flooded") == "held-unanswered"
        time.sleep(0.1)
        before = cpu_seconds(asker)
        time.sleep(0.3)
        assert cpu_seconds(asker) - before < 0.05


def test_bytes_that_are_not_zeromqs(asker: Asker) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()

        def talk() -> None:
            taken, _ = listener.accept()
            with taken:
                taken.sendall(bytes(range(256)) * 64)

        thread = threading.Thread(target=talk)
        thread.start()
        address = Address("127.0.0.1", listener.getsockname()[1])
        assert outcome(asker, inquiry(address)) == "held-unanswered"
        thread.join()


def test_many_questions_at_once_are_told_apart(asker: Asker) -> None:
    """Every third is held; answers come in reverse order of batches."""
    waiting: list[Question] = []

    def in_reverse(question: Question) -> list[list[bytes]]:
        waiting.append(question)
        if len(waiting) < 30:
            return []
        batch = [waiting.pop() for _ in range(30)]
        return [
            [b"", Reply(q.number, Answer.HELD if q.agent[0] % 3 == 0 else Answer.GONE).encode()]
            for q in batch
        ]

    with owner(in_reverse) as (address, _):
        asked = {str(index): inquiry(address) for index in range(90)}
        for key, item in asked.items():
            asker.is_held(key, item)
        for key, item in asked.items():
            expected = "held" if item.question.agent[0] % 3 == 0 else "not-held"
            assert outcome(asker, item, key) == expected
    assert not asker._asked and not asker._numbers


def test_an_owner_that_comes_back_is_asked_anew(asker: Asker) -> None:
    """The first connection leads nowhere; questions that still wait are sent over a new one."""
    seen: set[int] = set()

    def the_second_time(question: Question) -> list[list[bytes]]:
        if question.number in seen:
            return [[b"", Reply(question.number, Answer.HELD).encode()]]
        seen.add(question.number)
        return []

    with owner(the_second_time) as (address, came):
        asker.is_held("first", inquiry(address))
        time.sleep(SECONDS / 2)
        asker.is_held("second", inquiry(address))
        assert outcome(asker, inquiry(address), "first") == "held-unanswered"
        assert outcome(asker, inquiry(address), "second") == "held"
    assert len(came) == 3


def test_no_more_are_asked_than_may_wait(asker: Asker, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are put off until there is room; nothing is dropped."""
    monkeypatch.setattr(asker_module, "MAX_PENDING", 4)
    most = 0
    with owner(says(Answer.HELD)) as (address, _):
        asked = {str(index): inquiry(address) for index in range(20)}
        came: set[str] = set()
        give_up_at = time.monotonic() + 10
        while len(came) < len(asked) and time.monotonic() < give_up_at:
            for key in set(asked) - came:
                found = asker.is_held(key, asked[key])
                most = max(most, len(asker._asked))
                if found is not None:
                    assert found == "held"
                    came.add(key)
    assert len(came) == 20 and most == 4


def test_forgotten_questions_leave_nothing(asker: Asker) -> None:
    with owner(says(Answer.HELD)) as (address, _):
        asker.is_held("gone", inquiry(address))
        asker.forget("gone")
        asker.forget("gone")
        assert outcome(asker, inquiry(address)) == "held"
    assert not asker._asked and not asker._numbers


def test_an_error_in_the_thread_ends_what_was_asked(
    asker: Asker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with owner(says(Answer.HELD)) as (address, _):
        with monkeypatch.context() as broken:

            def fail(message: bytes) -> Reply:
                raise RuntimeError("injected by the test")

            broken.setattr(Reply, "decode", fail)
            assert outcome(asker, inquiry(address)) == "held-unanswered"
        assert outcome(asker, inquiry(address)) == "held"
    assert "injected by the test" in caplog.text


def test_a_thread_that_is_gone_does_not_hang_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """The request fails, and the next question starts another thread."""
    asker = Asker(SECONDS)
    with owner(says(Answer.HELD)) as (address, _):
        with monkeypatch.context() as broken:
            broken.setattr(Asker, "_run", lambda self: None)
            assert outcome(asker, inquiry(address)) == "held-unanswered"
        assert outcome(asker, inquiry(address)) == "held"
    asker.close()


def test_closed_with_questions_under_way(asker: Asker) -> None:
    with owner(lambda question: []) as (address, _):
        asker.is_held("waits", inquiry(address))
        asker.close()
        asker.close()
        assert outcome(asker, inquiry(address), "waits") == "held-unanswered"
        assert outcome(asker, inquiry(address), "late") == "held-unanswered"
    assert not [t for t in threading.enumerate() if t.name == "kvpd-asker"]


def test_nothing_runs_while_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asker_module, "IDLE_SECONDS", 0.2)
    asker = Asker(SECONDS)
    assert asker._thread is None, "no thread before the first question"
    with owner(says(Answer.HELD)) as (address, _):
        assert outcome(asker, inquiry(address)) == "held"
        time.sleep(0.4)
        before = cpu_seconds(asker), wake_ups(asker)
        time.sleep(0.5)
        assert (cpu_seconds(asker), wake_ups(asker)) == before
    asker.close()


def cpu_seconds(asker: Asker) -> float:
    """Of the asking thread."""
    assert asker._thread is not None and asker._thread.ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(asker._thread.ident))


def wake_ups(asker: Asker) -> int:
    """How often the thread went to sleep of its own will."""
    assert asker._thread is not None
    with open(f"/proc/self/task/{asker._thread.native_id}/status") as status:
        (line,) = [line for line in status if line.startswith("voluntary")]
    return int(line.split()[1])
