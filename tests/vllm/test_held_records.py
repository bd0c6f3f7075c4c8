"""What an owner notes and answers, in all orders of events, against memory that is really reused.

The model keeps what lies in every block of a prefill. Two decoders read block by block while
requests are released, expire, are reused and the prefill starts anew. Whatever a decoder is told,
it may take only what it read of its own request. Needs no vLLM.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpd.vllm.held import (
    MAX_ENDED,
    MAX_STARTS,
    WHAT,
    Answer,
    Notifiers,
    Question,
    Records,
    Reply,
    agent_digest,
    content_digest,
    new_id,
)
from kvpd.vllm.readers import Readers

BLOCKS = 4
BLOCKS_A_REQUEST = 2


@dataclass
class Finished:
    """A prefilled request; what a router would pass on."""

    name: str
    blocks: list[int]
    content: str
    request: bytes
    start: int
    # Ranks that gave the blocks back; all of them: the blocks are free.
    sent: set[int] = field(default_factory=set)
    is_freed: bool = False
    is_expired: bool = False


@dataclass
class Read:
    """One rank of a decoder reads what a request names."""

    name: str
    decoder: int
    rank: int
    what: Finished
    blocks: list[int]
    starts: tuple[bytes, ...]
    carries_notice: bool
    takes_released: bool
    got: list[str] = field(default_factory=list)
    question: Question | None = None
    answer: Answer | None = None


class Orders:
    """One prefill, two decoders; as many ranks on each side.

    Attributes:
        answers: how often a decoder was told what, and whether it took its pages.
    """

    def __init__(self, num_ranks: int, rng: random.Random) -> None:
        self.num_ranks = num_ranks
        self.rng = rng
        self.answers: Counter[tuple[str, bool]] = Counter()
        self.serial = itertools.count()
        self.records = Records()
        self.finished: list[Finished] = []
        self.reads: list[Read] = []
        self.past: list[Read] = []
        self.readers = [[Readers() for _ in range(self.num_ranks)] for _ in range(2)]
        self.num_starts = 0
        self.start_anew()

    # What the prefill does

    def start_anew(self) -> None:
        self.num_starts += 1
        self.starts = [new_id() for _ in range(self.num_ranks)]
        self.records.begin(self.starts)
        self.memory = [[f"dust {next(self.serial)}"] * BLOCKS for _ in range(self.num_ranks)]
        self.free = list(range(BLOCKS))
        self.notifiers = [Notifiers() for _ in range(self.num_ranks)]
        # Notices that came; requests that a rank keeps; what ranks have told the scheduler.
        self.inbox: list[list[tuple[str, str]]] = [[] for _ in range(self.num_ranks)]
        self.kept: list[set[str]] = [set() for _ in range(self.num_ranks)]
        self.told: list[tuple[int, set[str], dict[str, frozenset[bytes]]]] = []

    def current(self, name: str) -> Finished | None:
        for request in self.finished:
            if request.name == name and request.start == self.num_starts and not request.is_freed:
                return request
        return None

    def prefill(self) -> None:
        if len(self.free) < BLOCKS_A_REQUEST:
            return
        blocks = [self.free.pop(0) for _ in range(BLOCKS_A_REQUEST)]
        name = f"request-{next(self.serial)}"
        for rank in range(self.num_ranks):
            for block in blocks:
                self.memory[rank][block] = f"{name} rank {rank} block {block}"
            self.kept[rank].add(name)
        request = self.records.enter(name, content_digest([blocks], 32, 32, None))
        self.finished.append(Finished(name, blocks, name, request, self.num_starts))

    def worker_steps(self) -> None:
        """As vLLM's worker: the first notice of one expected gives a request back."""
        rank = self.rng.randrange(self.num_ranks)
        notices: dict[str, list[bytes]] = {}
        released = set()
        for agent, name in self.inbox[rank]:
            notices.setdefault(agent, []).append(f"{name}:1".encode())
            if name in self.kept[rank]:
                self.kept[rank].remove(name)
                released.add(name)
        self.inbox[rank] = []
        self.notifiers[rank].note(notices, released, self.kept[rank])
        self.told.append((rank, released, self.notifiers[rank].take()))

    def a_lease_ends(self) -> None:
        rank = self.rng.randrange(self.num_ranks)
        if not self.kept[rank]:
            return
        name = self.rng.choice(sorted(self.kept[rank]))
        self.kept[rank].remove(name)
        self.told.append((rank, {name}, {}))
        request = self.current(name)
        assert request is not None
        request.is_expired = True

    def scheduler_steps(self) -> None:
        for rank, sent, releases in self.told:
            for name, agents in releases.items():
                self.records.release(name, self.starts[rank], agents)
            for name in sent:
                request = self.current(name)
                assert request is not None
                request.sent.add(rank)
                if len(request.sent) == self.num_ranks:
                    self.records.end(name)
                    request.is_freed = True
                    # What is freed first is taken first: reuse comes soon.
                    self.free = request.blocks + self.free
        self.told = []

    def restart(self) -> None:
        if self.rng.random() < 0.5:
            self.records.clear()
        self.start_anew()

    # What decoders do

    def begin(self) -> None:
        if not self.finished:
            return
        decoder, stock = self.rng.randrange(2), self.rng.random() < 0.5
        what = self.rng.choice(self.finished[-3:])
        is_tampered = self.rng.random() < 0.1
        blocks = list(reversed(what.blocks)) if is_tampered else what.blocks
        name = f"read-{next(self.serial)}"
        for rank in range(self.num_ranks):
            readers = self.readers[decoder][rank]
            if not readers.begin("P", what.name, name):
                continue
            is_only = readers.notifies("P", what.name, name)
            starts = (self.starts[rank],)
            takes = stock and is_only
            self.reads.append(
                Read(name, decoder, rank, what, blocks, starts, stock, takes_released=takes)
            )

    def unread(self) -> list[Read]:
        return [read for read in self.reads if len(read.got) < len(read.blocks)]

    def read_a_block(self) -> None:
        if not self.unread():
            return
        read = self.rng.choice(self.unread())
        read.got.append(self.memory[read.rank][read.blocks[len(read.got)]])
        if len(read.got) == len(read.blocks) and read.carries_notice:
            self.notify(read)

    def agent(self, read: Read) -> str:
        return f"decoder {read.decoder} rank {read.rank}"

    def notify(self, read: Read) -> None:
        self.inbox[read.rank].append((self.agent(read), read.what.name))

    def a_read_fails(self) -> None:
        if not self.unread():
            return
        read = self.rng.choice(self.unread())
        self.reads.remove(read)
        self.readers[read.decoder][read.rank].end(read.name, is_released=False)

    def an_exception_ends_a_request(self) -> None:
        """Its READ goes on, and the notice that it carries is sent; another request may begin."""
        posted = [read for read in self.reads if read.carries_notice and read.question is None]
        if not posted:
            return
        read = self.rng.choice(posted)
        if len(read.got) < len(read.blocks):
            self.notify(read)
        self.reads.remove(read)
        self.past.append(read)
        self.readers[read.decoder][read.rank].end(read.name, is_released=False)

    def unasked(self) -> list[Read]:
        return [r for r in self.reads if len(r.got) == len(r.blocks) and r.question is None]

    def ask(self) -> None:
        if not self.unasked():
            return
        read = self.rng.choice(self.unasked())
        content = content_digest([read.blocks], 32, 32, None)
        agent = agent_digest(self.agent(read))
        read.question = Question(WHAT, 1, read.starts, read.what.request, content, agent)

    def unanswered(self) -> list[Read]:
        return [read for read in self.reads if read.question is not None]

    def answer(self) -> None:
        if not self.unanswered():
            return
        read = self.rng.choice(self.unanswered())
        assert read.question is not None
        asked = Question.decode(read.question.encode())
        assert asked is not None
        answer = self.records.answer(asked)
        what = read.what
        is_held = (
            what.start == self.num_starts
            and not what.is_freed
            and read.blocks == what.blocks
            and read.starts == (self.starts[read.rank],)
        )
        assert (answer is Answer.HELD) == is_held
        is_served = is_held or (answer is Answer.RELEASED and read.takes_released)
        self.answers[answer.name, is_served] += 1
        own = [f"{what.name} rank {read.rank} block {block}" for block in what.blocks]
        if is_served:
            assert read.got == own, "another's pages were taken for the request's"
        else:
            # A request that nobody disturbed is never refused.
            disturbed = (
                what.start != self.num_starts
                or what.is_expired
                or read.blocks != what.blocks
                or read.starts != (self.starts[read.rank],)
                or len({(r.name, r.decoder) for r in self.ever_read(what)}) > 1
                or not read.takes_released
            )
            assert disturbed
        if is_served and not read.carries_notice:
            self.notify(read)
        self.reads.remove(read)
        gone = is_served or read.carries_notice
        self.readers[read.decoder][read.rank].end(read.name, is_released=gone)
        self.past.append(read)

    def ever_read(self, what: Finished) -> list[Read]:
        return [read for read in [*self.reads, *self.past] if read.what is what]


# What happens, and how often beside the others.
EVENTS: list[tuple[Callable[[Orders], None], float]] = [
    (Orders.prefill, 6),
    (Orders.worker_steps, 4),
    (Orders.scheduler_steps, 4),
    (Orders.a_lease_ends, 1),
    (Orders.restart, 0.3),
    (Orders.begin, 5),
    (Orders.read_a_block, 16),
    (Orders.a_read_fails, 2),
    (Orders.an_exception_ends_a_request, 2),
    (Orders.ask, 8),
    (Orders.answer, 4),
]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_whatever_the_order_nobody_takes_anothers_pages(num_ranks: int) -> None:
    """With two ranks each reads, notifies and asks by itself; blocks are free when both gave up."""
    answers: Counter[tuple[str, bool]] = Counter()
    events, weights = zip(*EVENTS, strict=True)
    for seed in range(600):
        rng = random.Random(seed)
        orders = Orders(num_ranks, rng)
        for event in rng.choices(events, weights, k=150):
            event(orders)
        answers += orders.answers
    # Else nothing was compared.
    for seen in (("HELD", True), ("RELEASED", True), ("RELEASED", False), ("GONE", False)):
        assert answers[seen] > 10, answers


# ---------------------------------------------------------------------- one thing at a time

START, OTHER = new_id(), new_id()
CONTENT = content_digest([[3, 4]], 32, 32, "a" * 64)
ME, SOMEBODY = agent_digest("me"), agent_digest("somebody")


def question(known: bytes, **changes: Any) -> Question:
    whole: dict[str, Any] = {
        "what": WHAT, "number": 7, "starts": (START,), "request": known, "content": CONTENT,
        "agent": ME,
    }  # fmt: skip
    return Question(**{**whole, **changes})


def test_two_ranks_that_were_read_were_both_released_by_the_asker() -> None:
    """One that ran into its lease may have been overwritten while it was read."""
    records = Records()
    records.begin([START, OTHER])
    for by, expected in (
        ({START: [ME], OTHER: [ME, SOMEBODY]}, Answer.RELEASED),
        ({START: [ME], OTHER: [SOMEBODY]}, Answer.GONE),
        ({START: [ME]}, Answer.GONE),
        ({}, Answer.GONE),
    ):
        request = records.enter("r", CONTENT)
        assert records.answer(question(request, starts=(START, OTHER))) is Answer.HELD
        for start, agents in by.items():
            records.release("r", start, agents)
        records.end("r")
        assert records.answer(question(request, starts=(START, OTHER))) is expected


def test_everything_in_a_question_binds() -> None:
    records = Records()
    records.begin([START])
    request = records.enter("r", CONTENT)
    assert records.answer(question(request)) is Answer.HELD
    for changes in (
        {"starts": (OTHER,)},
        {"starts": (START, OTHER)},
        {"request": new_id()},
        {"content": content_digest([[4, 3]], 32, 32, "a" * 64)},
    ):
        assert records.answer(question(request, **changes)) is Answer.GONE
    records.begin([START])
    assert records.answer(question(request)) is Answer.GONE, "registered anew under one id"


@given(
    st.lists(
        st.tuples(
            st.lists(st.lists(st.integers(0, 5), max_size=3), max_size=3),
            st.integers(0, 3),
            st.integers(0, 3),
            st.sampled_from([None, "a" * 64, "b" * 64]),
        ),
        min_size=2,
        max_size=2,
        unique_by=repr,
    )
)
def test_contents_that_differ_have_digests_that_differ(contents: list[Any]) -> None:
    first, second = (content_digest(*content) for content in contents)
    assert first != second


def test_what_has_ended_is_remembered_for_a_while() -> None:
    records = Records()
    records.begin([START])
    requests = []
    for index in range(MAX_ENDED + 1):
        requests.append(records.enter(f"r{index}", CONTENT))
        records.release(f"r{index}", START, [ME])
        records.end(f"r{index}")
    assert records.answer(question(requests[0])) is Answer.GONE
    assert records.answer(question(requests[1])) is Answer.RELEASED
    assert (len(records._known), len(records._ended), records.num_held) == (MAX_ENDED,) * 2 + (0,)


def test_a_reply_is_shorter_than_any_question() -> None:
    shortest = question(bytes(16), number=0, starts=(bytes(16),)).encode()
    longest = Reply(2**63 - 1, Answer.RELEASED).encode()
    assert len(longest) < len(shortest)
    assert len(question(bytes(16), starts=(START,) * MAX_STARTS).encode()) < 1 << 10


@given(st.binary(max_size=200))
def test_any_bytes_are_no_question_or_one(message: bytes) -> None:
    found = Question.decode(message)
    assert found is None or found.what == WHAT
    assert Reply.decode(message) is None or isinstance(Reply.decode(message), Reply)


@pytest.mark.parametrize(
    "changes",
    [
        {"what": b"get_meta_msg"},
        {"number": -1},
        {"number": 2**63},
        {"starts": ()},
        {"starts": (START,) * (MAX_STARTS + 1)},
        {"starts": (START[:-1],)},
        {"request": b""},
        {"content": CONTENT + b"x"},
        {"agent": "text"},
    ],
)
def test_questions_out_of_bounds_are_none(changes: dict[str, Any]) -> None:
    assert Question.decode(question(new_id()).encode()) is not None
    assert Question.decode(msgspec.msgpack.encode(question(new_id(), **changes))) is None


def test_no_answer_is_held_once_a_record_has_ended() -> None:
    """The other thread's `end` is waited for by nobody, and yet is a line that answers keep."""
    records = Records()
    records.begin([START])
    stop, wrong = threading.Event(), []
    ended: dict[bytes, bool] = {}

    def ask() -> None:
        while not stop.is_set():
            for request in list(ended):
                had_ended = ended[request]
                if records.answer(question(request)) is Answer.HELD and had_ended:
                    wrong.append(request)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for index in range(300):
        request = records.enter(f"r{index}", CONTENT)
        ended[request] = False
        records.end(f"r{index}")
        ended[request] = True
        if len(ended) > 8:
            ended.pop(next(iter(ended)))
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong
