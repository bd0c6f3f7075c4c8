"""The decoder's one NIXL agent, which all contestants share as an engine's requests do."""

from __future__ import annotations

from collections import Counter
from typing import Any

from kvpd.nixl import Agent, AgentName


class SharedAgent(Agent):
    """A peer is loaded by the first who asks for it and removed by the last.

    With an agent for each contestant, the threads of all others would run beside the one measured.
    """

    def __init__(self, native: Any) -> None:
        super().__init__(native)
        self._names: dict[bytes, AgentName] = {}
        self._num_users: Counter[AgentName] = Counter()

    def add_peer(self, metadata: bytes) -> AgentName:
        """As `Agent.add_peer`; a peer that is known already stays as it is."""
        if metadata not in self._names:
            self._names[metadata] = super().add_peer(metadata)
        name = self._names[metadata]
        self._num_users[name] += 1
        return name

    def remove_peer(self, peer: AgentName) -> None:
        """As `Agent.remove_peer`, once nobody uses it any more."""
        self._num_users[peer] -= 1
        if self._num_users[peer] == 0:
            self._names = {known: name for known, name in self._names.items() if name != peer}
            super().remove_peer(peer)
