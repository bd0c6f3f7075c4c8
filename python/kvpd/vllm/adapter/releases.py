"""Whose notices made a rank give blocks back: from its worker to the engine's scheduler.

vLLM tells the scheduler which requests were sent, not because of whom. A reader whose READ carries
the notice has to be told from another that sent one for the same request, and from a lease.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata


@dataclass
class Releases(KVConnectorWorkerMetadata):
    """What ranks gave back in one step.

    Attributes:
        agents: by start id of the rank and request, `agent_digest` of each agent whose notice was
            counted.
    """

    agents: dict[bytes, dict[str, frozenset[bytes]]]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> Releases:
        """What both say; no two ranks have one start id, and steps of one follow each other."""
        found = {start: dict(requests) for start, requests in self.agents.items()}
        if isinstance(other, Releases):
            for start, requests in other.agents.items():
                found.setdefault(start, {}).update(requests)
        return Releases(found)


class ReceivedNotices:
    """A NIXL agent that remembers which notices it was asked for."""

    def __init__(self, native: Any) -> None:
        self._native = native
        self.notices: dict[str, list[bytes]] = {}

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        """As the agent's."""
        self.notices = self._native.get_new_notifs()
        return self.notices

    def __getattr__(self, name: str) -> Any:
        return getattr(self._native, name)
