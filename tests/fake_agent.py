"""FAKE agents, for tests of the state machine only: tiny READs over real NIXL finish at once.

`FakeHoldingAgent` stands before a real NIXL agent. Bytes are moved by NIXL; only when the receiver
learns of it, and what it is told, is faked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpd.convert import Completion, Conversion, ConversionQueue
from kvpd.errors import TransferError
from kvpd.nixl import Agent, AgentName, Registration, Rows, Transfer, TransferState


class FakeHoldingAgent(Agent):
    """Withholds completion, reports failures, refuses releases, and counts calls.

    Attributes:
        holds: READs are reported active although they may be done.
        fails: READs are reported failed.
        refuses_release: handles are reported as not released.
        refuses_rows: preparing remote rows fails, as for memory that the peer never registered.
        refuses_notices: notices cannot be sent.
        reads: local descriptor ids of every READ posted.
        sent: notices sent.
        peers, rows, registrations: what is registered now.
    """

    def __init__(self, native: Any) -> None:
        super().__init__(native)
        self.holds = self.fails = self.refuses_release = False
        self.refuses_rows = self.refuses_notices = False
        self.reads: list[list[int]] = []
        self.sent: list[bytes] = []
        self.peers: list[AgentName] = []
        self.rows: list[Rows] = []
        self.registrations: list[Registration] = []

    def add_peer(self, metadata: bytes) -> AgentName:
        name = super().add_peer(metadata)
        if name not in self.peers:  # NIXL knows an agent once, however often it is told
            self.peers.append(name)
        return name

    def remove_peer(self, peer: AgentName) -> None:
        super().remove_peer(peer)
        self.peers.remove(peer)

    def register(self, ranges: Any) -> Registration:
        registration = super().register(ranges)
        self.registrations.append(registration)
        return registration

    def deregister(self, registration: Registration) -> None:
        super().deregister(registration)
        self.registrations.remove(registration)

    def prepare_local(self, rows: NDArray[np.uint64], memory: Any) -> Rows:
        prepared = super().prepare_local(rows, memory)
        self.rows.append(prepared)
        return prepared

    def prepare_remote(self, peer: AgentName, rows: NDArray[np.uint64], memory: Any) -> Rows:
        if self.refuses_rows:
            raise TransferError("fake: no such memory", code="nixl", field="prepare")
        prepared = super().prepare_remote(peer, rows, memory)
        self.rows.append(prepared)
        return prepared

    def release_rows(self, rows: Rows) -> None:
        super().release_rows(rows)
        self.rows.remove(rows)

    def read(self, local: Rows, local_ids: Any, remote: Rows, remote_ids: Any) -> Transfer:
        self.reads.append(local_ids.tolist())
        transfer = super().read(local, local_ids, remote, remote_ids)
        transfer.state = "active"
        return transfer

    def poll(self, transfer: Transfer) -> TransferState:
        if self.fails:
            transfer.state, transfer.error = "failed", "fake: NIXL reports ERR"
        if self.holds and transfer.state == "active":
            return "active"
        return super().poll(transfer)

    def release(self, transfer: Transfer) -> bool:
        return False if self.refuses_release else super().release(transfer)

    def notify(self, peer: AgentName, text: bytes) -> None:
        if self.refuses_notices:
            raise TransferError("fake: no route", code="nixl", field="notify")
        super().notify(peer, text)
        self.sent.append(text)


class FakeHoldingQueue(ConversionQueue):
    """Converts at once and says so late; records what was converted.

    Attributes:
        holds: completions are not done yet.
        breaks: raised by completions, as a device error would be.
        refuses: raised by submit, before anything is converted.
        converted: target ids of every conversion.
    """

    def __init__(self, device: Any) -> None:
        super().__init__(device)
        self.holds = False
        self.breaks: Exception | None = None
        self.refuses: Exception | None = None
        self.converted: list[list[int]] = []

    def submit(self, conversion: Conversion, source_ids: Any, target_ids: Any) -> Completion:
        if self.refuses is not None:
            raise self.refuses
        self.converted.append(target_ids.tolist())
        super().submit(conversion, source_ids, target_ids)
        return _FakeCompletion(self._state)

    def _state(self) -> bool:
        if self.breaks is not None:
            raise self.breaks
        return not self.holds


class _FakeCompletion(Completion):
    def __init__(self, state: Callable[[], bool]) -> None:
        super().__init__(None)
        self._state = state

    def done(self) -> bool:
        return self._state()
