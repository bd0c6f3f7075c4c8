"""One request's way through the receive pipeline, and how it ends."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import TYPE_CHECKING, Literal

from kvpd._kvpd import Runs
from kvpd.nixl import Transfer

if TYPE_CHECKING:
    from kvpd.convert import Completion
    from kvpd.peer import Peer

FailureCode = Literal[
    "aborted", "conversion-failed", "deadline-passed", "peer-removed", "read-failed"
]


@dataclass(frozen=True)
class Timings:
    """Seconds a request spent waiting for its turn, reading, and converting."""

    queued_seconds: float
    read_seconds: float
    convert_seconds: float


@dataclass(frozen=True)
class DescriptorCounts:
    """Descriptors of one READ.

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
        notice_error: why the release notice could not be sent; "" when it was. The pages are right
            either way; the peer keeps its blocks until their lease ends.
    """

    request_id: str
    num_blocks: int
    num_bytes: int
    descriptors: DescriptorCounts
    timings: Timings
    notice_error: str = ""


@dataclass(frozen=True)
class Failed:
    """The request ended without pages. Nothing writes its blocks any more.

    Attributes:
        code: stable name of the cause.
        reason: the cause in words.
        invalid_blocks: every local block of the request; none of them holds what was asked for.
    """

    request_id: str
    code: FailureCode
    reason: str
    invalid_blocks: tuple[int, ...]


Outcome = Ready | Failed


class State(Enum):
    """Where a request stands.

    ::

        QUEUED -> READING -> CONVERTING -> (Ready)
           |         |           |
           |         v           v
           +-----> (Failed) <- DRAINING     DRAINING: failed, but the READ may still write
    """

    QUEUED = auto()
    READING = auto()
    CONVERTING = auto()
    DRAINING = auto()


@dataclass
class Request:
    """The live state of one request; only the receiver changes it.

    Attributes:
        runs: pages to read, paired and sorted by remote id.
        deadline: clock reading after which the peer may reuse its blocks; None without a lease.
        notice: what releases the blocks on the peer.
    """

    request_id: str
    peer: Peer
    runs: Runs
    notice: bytes
    deadline: float | None
    queued_at: float
    state: State = State.QUEUED
    transfer: Transfer | None = None
    completion: Completion | None = None
    failure: tuple[FailureCode, str] | None = None
    started_at: float = 0.0
    read_at: float = 0.0
    descriptors: DescriptorCounts = field(default_factory=lambda: DescriptorCounts(0, 0, 0))

    def count(self, num_descriptors: int | None) -> None:
        """Note how many descriptors NIXL counted."""
        self.descriptors = replace(self.descriptors, counted=num_descriptors)

    def is_late(self, now: float) -> bool:
        """Whether the peer may have given the blocks to somebody else by `now`."""
        return self.deadline is not None and now >= self.deadline

    def blocks(self) -> tuple[int, ...]:
        """Local block ids."""
        return tuple(self.runs.local_ids.tolist())
