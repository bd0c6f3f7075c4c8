"""One request's way through the receive pipeline, and how it ends."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from kvpd.chunk import Chunk
from kvpd.words import Placement

if TYPE_CHECKING:
    from kvpd._kvpd import RequestPlan, Runs
    from kvpd.peer import Peer

FailureCode = Literal[
    "aborted",
    "conversion-failed",
    "deadline-passed",
    "held-unanswered",
    "internal-error",
    "not-held",
    "peer-removed",
    "read-failed",
]


@dataclass(frozen=True)
class NotHeld:
    """The peer does not vouch for what was read.

    Attributes:
        code: it has let go of the blocks, or did not answer.
        reason: in words.
    """

    code: Literal["held-unanswered", "not-held"]
    reason: str


# Asked again and again once the last byte was read: None as long as there is no answer.
HeldCheck = Callable[[], Literal["held"] | NotHeld | None]


@dataclass(frozen=True)
class Timings:
    """Seconds a request spent waiting for its turn, reading, converting, and for its peer's word.

    Attributes:
        queued_seconds: until the first chunk began.
        read_seconds: from there until the last byte of the peer's memory was read. Direct, that
            includes the conversion.
        convert_seconds: from there until everything was converted: what conversion adds, not what
            it takes, for all chunks but the last are converted while others are read.
        held_seconds: from the last byte until the peer had said that it still held the blocks; the
            conversion goes on meanwhile. None where it is not asked.
    """

    queued_seconds: float
    read_seconds: float
    convert_seconds: float
    held_seconds: float | None = None


@dataclass(frozen=True)
class DescriptorCounts:
    """Descriptors of all READs of a request.

    Attributes:
        planned: rows x pages, before merging.
        merged: after merging neighbours, as planned.
        counted: after merging, as NIXL counted; None when NIXL counts nothing.
    """

    planned: int
    merged: int
    counted: int | None


@dataclass(frozen=True)
class Ready:
    """All pages of the request are in the cache, in the local format.

    Attributes:
        placement: how they came.
        is_converted: the peer's pages have another format than the local ones.
        post_seconds: the part of `timings` that posting took in the calling thread.
        notice_error: why the release notice could not be sent; "" when it was. The pages are right
            either way; the peer keeps its blocks until their lease ends.
    """

    request_id: str
    placement: Placement
    is_converted: bool
    num_blocks: int
    num_bytes: int
    descriptors: DescriptorCounts
    timings: Timings
    post_seconds: float
    notice_error: str = ""


@dataclass(frozen=True)
class Failed:
    """The request ended without pages. Nothing writes its blocks any more.

    Attributes:
        code: stable name of the cause.
        reason: the cause in words.
        invalid_blocks: every local block of the request; what any of them holds is unknown.
    """

    request_id: str
    code: FailureCode
    reason: str
    invalid_blocks: tuple[int, ...]


Outcome = Ready | Failed


@dataclass
class Request:
    """The live state of one request; only the receiver changes it.

    Attributes:
        plan: how they come.
        runs: pages to read, paired and sorted by remote id.
        deadline: clock reading after which the peer may reuse its blocks; None without a lease.
        is_held: says whether the peer still held the blocks; None where it cannot be asked, and the
            deadline alone decides.
        held_at: clock reading at which it had said so.
        converted_at: clock reading at which nothing was left to do but that.
        notice: what releases the blocks on the peer.
        waiting: chunks that have not begun, in order.
        active: chunks that have begun and may still read or write memory.
        failure: the first cause; the request ends when nothing is active any more.
    """

    request_id: str
    peer: Peer
    plan: RequestPlan
    runs: Runs
    notice: bytes
    deadline: float | None
    queued_at: float
    waiting: deque[Chunk]
    is_held: HeldCheck | None = None
    active: list[Chunk] = field(default_factory=list)
    failure: tuple[FailureCode, str] | None = None
    started_at: float | None = None
    read_at: float = 0.0
    held_at: float | None = None
    converted_at: float | None = None
    post_seconds: float = 0.0
    counted: int | None = 0

    def count(self, num_descriptors: int | None) -> None:
        """Add the descriptors of one READ, as NIXL counted them."""
        known = num_descriptors is not None and self.counted is not None
        self.counted = (self.counted or 0) + (num_descriptors or 0) if known else None

    def is_late(self, now: float) -> bool:
        """Whether the peer may have given the blocks to somebody else by `now`.

        Where it is asked, its word decides about everything that was begun.
        """
        if self.is_held is not None and self.started_at is not None:
            return False
        return self.deadline is not None and now >= self.deadline

    @property
    def is_read(self) -> bool:
        """Whether nothing more is read from the peer."""
        return not self.waiting and not any(chunk.reads_peer for chunk in self.active)

    def blocks(self) -> tuple[int, ...]:
        """Local block ids."""
        return tuple(self.runs.local_ids.tolist())
