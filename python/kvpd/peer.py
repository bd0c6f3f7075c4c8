"""A peer that was accepted: what is prepared once for all of its requests."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from collections.abc import Mapping as ReadOnlyDict
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from kvpd._kvpd import EngineDescription, Planner, RequestPlan, Runs, Verdict
from kvpd.chunk import Chunk
from kvpd.errors import DirectError, TransferError
from kvpd.nixl import Agent, AgentName, Rows, Transfer

if TYPE_CHECKING:
    from kvpd.convert import Conversion
    from kvpd.direct import Mapping
    from kvpd.staging import Slab
    from kvpd.words import Placement

# [cut][group of layers]
Conversions: TypeAlias = "ReadOnlyDict[Placement, tuple[tuple[Conversion, ...], ...]]"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RowPair:
    """The prepared descriptor rows of one placement."""

    local: Rows
    remote: Rows


@dataclass(eq=False)
class Peer:
    """An engine rank whose pages we may read.

    Attributes:
        engine_id: as the peer published it.
        verdict: why it was accepted; kind "identical" or "convert".
        description: facts and regions as published.
        agent_name: the peer's NIXL agent, as NIXL returned it.
        planner: chooses how each request comes.
        conversions: by placement, from where raw pages land or lie to the cache: of each cut of the
            planner (one where there is no slab) one for each group of layers; none where the pages
            land as they stay.
        rows: by placement; none for one that reads nothing.
        slab: where staged pages land first.
        mapping: the peer's memory, where the conversion reads it.
        why_not_direct: why it does not, where it was asked for.
        is_leaving: no new requests; disconnected when the last one has ended.
    """

    engine_id: str
    verdict: Verdict
    description: EngineDescription
    agent_name: AgentName
    planner: Planner
    conversions: Conversions
    rows: ReadOnlyDict[Placement, RowPair]
    slab: Slab | None
    mapping: Mapping | None = None
    why_not_direct: str = ""
    is_leaving: bool = False

    def chunks(self, plan: RequestPlan, runs: Runs) -> Iterator[Chunk]:
        """The chunks of a request, in the order in which they should begin."""
        placement = plan.placement
        conversions = self.conversions.get(placement)
        local_ids, remote_ids = runs.local_ids, runs.remote_ids
        for index, part in enumerate(plan.chunks):
            pages = slice(part.first_page, part.first_page + part.num_pages)
            group, source_ids = 0, local_ids[pages]
            if placement == "direct":
                source_ids = remote_ids[pages]
            elif placement == "staged":
                group = part.first_layer // self.planner.cuts[plan.cut].group_layers
                source_ids = np.arange(part.num_pages, dtype=np.int32)
            yield Chunk(
                index=index,
                is_read=placement != "direct",
                needs_slot=placement == "staged",
                conversion=conversions[plan.cut][group] if conversions else None,
                source_ids=source_ids,
                target_ids=local_ids[pages],
            )

    def read(self, agent: Agent, plan: RequestPlan, chunk: Chunk) -> Transfer:
        """Post the READ of a chunk. Raises `TransferError`, `PlanError`."""
        local_ids, remote_ids = plan.descriptor_ids(chunk.index, chunk.slot or 0)
        rows = self.rows[plan.placement]
        return agent.read(rows.local, local_ids, rows.remote, remote_ids)

    @property
    def is_offered(self) -> bool:
        """Whether new requests may begin: a prefill that withdraws what we mapped waits for us."""
        mapping = self.mapping  # may be lost while another thread asks
        return mapping is None or mapping.is_offered()

    def explain(self) -> str:
        """How this peer's requests come, in words."""
        refused = [f"not direct: {self.why_not_direct}"] if self.why_not_direct else []
        return "\n".join([*refused, self.planner.explain()])

    def lose(self, reason: str) -> None:
        """Give up what a kernel may still read, for good: it is never reused and never unmapped.

        The peer takes no new requests: what its GPU work does is unknown from here on.
        """
        if self.slab is not None:
            self.slab.lose(reason)
        self.mapping = None
        self.is_leaving = True

    def unmap(self) -> None:
        """Let the peer's memory go; idempotent. Only when no kernel reads it any more."""
        mapping = self.mapping
        if mapping is not None:
            self._try(mapping.close)

    def disconnect(self, agent: Agent) -> None:
        """Unmap, free the rows and forget the peer. What will not be let go is logged and left.

        Only when no kernel reads the peer's memory any more.
        """
        self.unmap()
        for pair in self.rows.values():
            for rows in (pair.local, pair.remote):
                self._try(partial(agent.release_rows, rows))
        self._try(partial(agent.remove_peer, self.agent_name))

    def _try(self, step: Callable[[], None]) -> None:
        try:
            step()
        except (DirectError, TransferError) as error:
            logger.warning("disconnecting %s: %s", self.engine_id, error)
