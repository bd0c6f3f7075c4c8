"""A chunk: the part of a request that is read by one READ and converted by one launch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvpd.nixl import Transfer

if TYPE_CHECKING:
    from kvpd.convert import Completion, Conversion


class State(Enum):
    """Where a chunk that has begun stands; it has ended when it is in no list any more.

    ::

        READING -> CONVERTING -> (ended)
           |           |
           v           v
        DRAINING -> (ended)          DRAINING: failed, and waits for the READ's own end
    """

    READING = auto()
    CONVERTING = auto()
    DRAINING = auto()


@dataclass(eq=False)
class Chunk:
    """Some layers of some pages.

    Attributes:
        index: position in the request's plan.
        is_read: a READ brings the raw pages; False where the conversion reads the peer's memory.
        needs_slot: the raw pages land in a slot of the slab.
        conversion: from where they land, or lie, to the cache; None when they land as they stay.
        target_ids: blocks of the cache, as the conversion takes them.
        source_ids: pages of where they land or lie; of the slab, those of slot 0 until the chunk
            has a slot.
        slot: the slot, once the chunk has one.
    """

    index: int
    is_read: bool
    needs_slot: bool
    conversion: Conversion | None
    target_ids: NDArray[np.int32]
    source_ids: NDArray[np.int32]
    slot: int | None = None
    state: State = State.READING
    transfer: Transfer | None = None
    completion: Completion | None = None

    @property
    def reads_peer(self) -> bool:
        """Whether the peer's memory may still be read for it, as long as it is active."""
        return not self.is_read or self.state is State.READING

    def occupy(self, slot: int, stride_pages: int) -> None:
        """Take a slot; slot s begins at page ``s * stride_pages`` of the slab."""
        self.slot = slot
        self.source_ids = self.source_ids + np.int32(slot * stride_pages)
