"""Whether an engine still holds the blocks of a request: what it notes, is asked, and answers.

A reader asks after the last byte was read. The blocks of a request are written by nobody else from
before its parameters leave until its record ends, so the answer "held" proves every byte, whatever
clocks, leases and other readers did. See `kvpd.vllm.asker` for the reader's side.
"""

from __future__ import annotations

import enum
import hashlib
import secrets
import threading
from collections import OrderedDict
from collections.abc import Collection, Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Final, TypeVar

import msgspec
import numpy as np

ID_BYTES = 16
DIGEST_BYTES = 32
# Ranks of one engine that one rank of another reads from.
MAX_STARTS = 32
# Requests that have ended and are remembered, to tell their reader from somebody else.
MAX_ENDED = 1 << 14
# The first element of a question on the side channel; of vLLM's it is another.
WHAT: Final = b"kvpd_held"

_Id = Annotated[bytes, msgspec.Meta(min_length=ID_BYTES, max_length=ID_BYTES)]
_Digest = Annotated[bytes, msgspec.Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
_Number = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_HEADER = b"kvpd content 1"


class Answer(enum.IntEnum):
    """What an engine says about blocks.

    Attributes:
        GONE: they are not held, or never were: an unknown request, other blocks, another start.
        HELD: nobody has written them since the request was finished.
        RELEASED: given back, and each rank that was read from gave them back because the asking
            agent sent its notice. A notice that a READ carries is sent when that READ has ended, so
            that READ is right; of another notice this says nothing.
    """

    GONE = 0
    HELD = 1
    RELEASED = 2


class Question(msgspec.Struct, frozen=True, array_like=True):
    """Asks whether blocks are still held.

    Attributes:
        what: `WHAT`.
        number: comes back with the answer.
        starts: of every rank that was read from, the random id of its handshake's tag.
        request: the random id of the request.
        content: `content_digest` of what the request's parameters said.
        agent: `agent_digest` of the asking NIXL agent's name.
    """

    what: bytes
    number: _Number
    starts: Annotated[tuple[_Id, ...], msgspec.Meta(min_length=1, max_length=MAX_STARTS)]
    request: _Id
    content: _Digest
    agent: _Id

    def encode(self) -> bytes:
        """As it is sent."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, message: bytes) -> Question | None:
        """A question that was received; None if it is none."""
        question = _decoded(message, cls)
        return question if question is not None and question.what == WHAT else None


class Reply(msgspec.Struct, frozen=True, array_like=True):
    """An answer with its question's number. It is shorter than any question."""

    number: _Number
    answer: Answer

    def encode(self) -> bytes:
        """As it is sent."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, message: bytes) -> Reply | None:
        """A reply that was received; None if it is none."""
        return _decoded(message, cls)


def new_id() -> bytes:
    """A random id that nobody can guess."""
    return secrets.token_bytes(ID_BYTES)


def agent_digest(name: str) -> bytes:
    """A NIXL agent, in `ID_BYTES`: its name has any length."""
    return hashlib.sha256(name.encode()).digest()[:ID_BYTES]


def content_digest(
    block_ids: Sequence[Sequence[int]], num_tokens: int, num_proved: int, prompt: str | None
) -> bytes:
    """SHA-256 over everything in a request's parameters that says what lies in which block.

    Args:
        block_ids: of every KV group, in order, as published.
        num_tokens: leading tokens that were computed; with the lists they give the positions.
        num_proved: leading tokens of the prompt that `prompt` covers.
        prompt: digest of these; None where none can be made.
    """
    found = hashlib.sha256(_HEADER)
    sizes = [num_tokens, num_proved, len(block_ids), *(len(ids) for ids in block_ids)]
    found.update(np.asarray(sizes, dtype="<i8").tobytes())
    for ids in block_ids:
        found.update(np.asarray(ids, dtype="<i8").tobytes())
    found.update(b"" if prompt is None else prompt.encode())
    return found.digest()


@dataclass
class _Record:
    request: bytes
    content: bytes
    # By start id of the rank that gave the blocks back: the agents whose notices made it do so.
    released_by: dict[bytes, frozenset[bytes]] = field(default_factory=dict)


class Records:
    """Which requests' blocks this engine holds. For any thread.

    The engine's thread enters and ends, the side channel's answers. A record ends before vLLM
    frees the blocks; what was answered before that was true when it was.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._starts: frozenset[bytes] = frozenset()
        # By vLLM's name of the request.
        self._held: dict[str, _Record] = {}
        # By random id; ended ones are kept for a while.
        self._known: dict[bytes, tuple[_Record, bool]] = {}
        self._ended: OrderedDict[bytes, None] = OrderedDict()

    def begin(self, starts: Iterable[bytes]) -> None:
        """The ranks' caches are registered under these ids; nothing of before is held."""
        with self._lock:
            self._clear()
            self._starts = frozenset(starts)

    def clear(self) -> None:
        """Nothing is held any more: the cache's memory is about to be given away or overwritten."""
        with self._lock:
            self._clear()

    def enter(self, name: str, content: bytes) -> bytes:
        """A finished request keeps its blocks; its random id. Before its parameters leave.

        Args:
            name: vLLM's id of the request.
            content: `content_digest` of its parameters.
        """
        record = _Record(new_id(), content)
        with self._lock:
            self._end(name)
            self._held[name] = record
            self._known[record.request] = (record, True)
        return record.request

    def release(self, name: str, start: bytes, agents: Iterable[bytes]) -> None:
        """One rank gives the blocks back because these agents sent their notices."""
        with self._lock:
            record = self._held.get(name)
            if record is not None:
                record.released_by[start] = frozenset(agents)

    def end(self, name: str) -> None:
        """The blocks of a request are about to be freed; of a request that is unknown, nothing."""
        with self._lock:
            self._end(name)

    def answer(self, question: Question) -> Answer:
        """What is so now."""
        with self._lock:
            record, is_held = self._known.get(question.request, (None, False))
            if (
                record is None
                or record.content != question.content
                or not self._starts.issuperset(question.starts)
            ):
                return Answer.GONE
            if is_held:
                return Answer.HELD
            by = record.released_by
            is_own = all(question.agent in by.get(start, ()) for start in question.starts)
            return Answer.RELEASED if is_own else Answer.GONE

    @property
    def num_held(self) -> int:
        """Requests whose blocks are held."""
        with self._lock:
            return len(self._held)

    def _end(self, name: str) -> None:
        record = self._held.pop(name, None)
        if record is None:
            return
        self._known[record.request] = (record, False)
        self._ended[record.request] = None
        if len(self._ended) > MAX_ENDED:
            oldest, _ = self._ended.popitem(last=False)
            del self._known[oldest]

    def _clear(self) -> None:
        self._held.clear()
        self._known.clear()
        self._ended.clear()


class Notifiers:
    """Who sent notices for requests that one rank has; for its worker's thread."""

    def __init__(self) -> None:
        # Of requests that other notices are waited for.
        self._waiting: dict[str, set[bytes]] = {}
        self._released: dict[str, frozenset[bytes]] = {}

    def note(
        self, notices: dict[str, list[bytes]], released: Collection[str], known: Container[str]
    ) -> None:
        """Notices came.

        Args:
            notices: by agent.
            released: requests that the rank gives back because of them.
            known: requests that it keeps.
        """
        for agent, texts in notices.items():
            for text in texts:
                name = text.rpartition(b":")[0].decode(errors="replace")
                is_heartbeat = text.startswith(b"HB:")
                if not is_heartbeat and (name in released or name in known):
                    self._waiting.setdefault(name, set()).add(agent_digest(agent))
        for name in released:
            self._released[name] = frozenset(self._waiting.pop(name, ()))
        for name in [name for name in self._waiting if name not in known]:
            # Its lease has ended.
            del self._waiting[name]

    def take(self) -> dict[str, frozenset[bytes]]:
        """What was given back since the last call."""
        found, self._released = self._released, {}
        return found


_Struct = TypeVar("_Struct")


def _decoded(message: bytes, kind: type[_Struct]) -> _Struct | None:
    try:
        return msgspec.msgpack.decode(message, type=kind)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError):
        return None
