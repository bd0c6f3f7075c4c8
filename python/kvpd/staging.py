"""The slab: registered memory where raw pages land before they are converted into the cache."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import torch

from kvpd._kvpd import Region
from kvpd.errors import PlanError
from kvpd.nixl import Agent, MemoryRange

if TYPE_CHECKING:
    from kvpd.words import Memory


def memory_of(device: torch.device) -> tuple[Memory, int]:
    """NIXL's memory kind and device number of a torch device."""
    return ("dram", 0) if device.type == "cpu" else ("vram", device.index or 0)


class Slab:
    """A pool of equal slots, which requests take in turns, one slot a turn.

    A slot must not be given back before its READ's handle was released and its conversion has
    completed, or the next chunk's pages are overwritten.

    Args:
        agent: registers the memory.
        num_bytes: size of the slab.
        num_slots: slots it is cut into, at most one for each page.
        page_bytes: bytes of one layer's page.
        device: where the cache is.

    Raises:
        PlanError: no slots, or less memory than a page.
        TransferError: the memory cannot be registered.
    """

    def __init__(
        self,
        agent: Agent,
        num_bytes: int,
        num_slots: int,
        page_bytes: int,
        device: torch.device,
    ) -> None:
        for field, got, least in (
            ("slab_bytes", num_bytes, page_bytes),
            ("num_slots", num_slots, 1),
        ):
            if got < least:
                raise PlanError(
                    f"{field} is {got}; give it at least {least}",
                    code="slab-size",
                    field=field,
                    got=got,
                    expected=f"at least {least}",
                )
        self.tensor = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self.num_slots = min(num_slots, num_bytes // page_bytes)
        self.lost = ""
        memory, number = memory_of(device)
        address = self.tensor.data_ptr()
        self.region = Region(address, 1, num_bytes, num_bytes, memory=memory, device=number)
        self._registration = agent.register([MemoryRange.of(self.region)])
        self._free = list(range(self.num_slots))
        self._turns: deque[str] = deque()

    @property
    def use(self) -> float:
        """Fraction of the slots that are taken."""
        return 1 - len(self._free) / self.num_slots

    def enqueue(self, request_id: str) -> None:
        """Ask for slots, behind those who ask already."""
        self._turns.append(request_id)

    def whose_turn(self) -> str | None:
        """The request that may take a slot now; None while none is free or nobody asks."""
        return self._turns[0] if self._turns and self._free else None

    def take(self, request_id: str) -> int:
        """Take a slot. The request's next turn comes after all others that ask have had theirs.

        Raises:
            PlanError: it is not this request's turn.
        """
        if self.whose_turn() != request_id:
            raise PlanError(
                f"request {request_id} takes a slot out of turn",
                code="slab-turn",
                field="request_id",
                got=request_id,
                expected=self.whose_turn(),
            )
        self._turns.rotate(-1)
        return self._free.pop()

    def withdraw(self, request_id: str) -> None:
        """Ask for no more slots; those taken stay taken."""
        if request_id in self._turns:
            self._turns.remove(request_id)

    def give_back(self, slot: int) -> None:
        """Free a slot."""
        self._free.append(slot)

    def lose(self, reason: str) -> None:
        """Give the slab up for good: whether something still uses it cannot be told any more.

        Requests that find `lost` set fail instead of taking their turn.
        """
        self.lost = reason

    def close(self, agent: Agent) -> None:
        """Deregister the memory. Raises `TransferError`."""
        agent.deregister(self._registration)
