"""A peer that was accepted: what is prepared once for all of its requests."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial

from kvpd._kvpd import EngineDescription, Region, Runs, TransferPlan, Verdict, staged_ids
from kvpd.convert import Conversion, Pages, prepare
from kvpd.errors import PlanError, RefusedError, TransferError
from kvpd.nixl import Agent, Rows, Transfer
from kvpd.staging import Slab
from kvpd.wire import Handshake

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Peer:
    """An engine rank whose pages we may read.

    Attributes:
        engine_id: as the peer published it.
        verdict: why it was accepted; kind "identical" or "convert".
        description: facts and regions as published.
        agent_name: the peer's NIXL agent.
        plan: the descriptor rows.
        conversion: from raw pages to local pages; None when the formats are equal.
        slab: where raw pages land first; None when they land in the cache.
        is_leaving: no new requests; disconnected when the last one has ended.
    """

    engine_id: str
    verdict: Verdict
    description: EngineDescription
    agent_name: str
    plan: TransferPlan
    local_rows: Rows
    remote_rows: Rows
    conversion: Conversion | None
    slab: Slab | None
    max_blocks: int
    is_leaving: bool = False

    def landing(self, runs: Runs) -> Runs:
        """Where the raw pages land: slab pages 0, 1, 2, ... or the local blocks themselves.

        Both are in ascending order of the remote ids, so page i of one is page i of the other.
        """
        return runs if self.slab is None else staged_ids(runs.remote_ids)

    def read(self, agent: Agent, landing: Runs) -> Transfer:
        """Post the READ of a request's pages. Raises `TransferError`, `PlanError`."""
        local_ids, remote_ids = self.plan.descriptor_ids(landing)
        return agent.read(self.local_rows, local_ids, self.remote_rows, remote_ids)

    def disconnect(self, agent: Agent) -> None:
        """Free the rows and forget the peer. What NIXL refuses to let go is logged and left."""
        steps = (
            partial(agent.release_rows, self.local_rows),
            partial(agent.release_rows, self.remote_rows),
            partial(agent.remove_peer, self.agent_name),
        )
        for step in steps:
            try:
                step()
            except TransferError as error:
                logger.warning("disconnecting %s: %s", self.engine_id, error)


def connect(
    agent: Agent,
    local: EngineDescription,
    pages: Pages | None,
    handshake: Handshake,
    verdict: Verdict,
    slab: Slab | None,
    known_agents: Collection[str],
) -> Peer:
    """Prepare an accepted peer. On an error nothing of the peer stays registered.

    Args:
        agent: reads from the peer.
        local: our own description.
        pages: our own cache; needed when the verdict is "convert".
        handshake: what the peer published.
        verdict: the accepted verdict over the two.
        slab: where raw pages land; None for in place. Equal formats never pass through it.
        known_agents: NIXL agents of connected peers.

    Raises:
        RefusedError: the verdict is no acceptance.
        PlanError, ConversionError: the pair cannot be planned or converted.
        TransferError: NIXL refuses the peer or its rows, or its agent is another peer's.
    """
    remote = handshake.description
    if verdict.kind == "convert":
        if verdict.source is None or pages is None:
            raise PlanError("no pages to convert into", code="no-pages", field="storages")
        source = _in_order_of(local.layers, remote.regions)
        if slab is None:
            # The same memory seen as the peer's pages: the raw bytes lie in the local pieces.
            raw, target = pages.seen_as(verdict.source), local.regions
        else:
            target = slab.regions(source)
            raw = Pages.of(verdict.source, target, [slab.tensor])
        conversion = prepare(raw, pages)
        # Here, on the handshake: the first request must not wait for a compiler.
        conversion.warm_up()
    elif verdict.kind == "identical":
        source, target, conversion, slab = list(remote.regions), local.regions, None, None
    else:
        raise RefusedError(verdict)
    max_blocks = local.num_blocks if slab is None else slab.num_pages(source)
    plan = TransferPlan(target, source)
    name = agent.add_peer(handshake.nixl_metadata)
    if name in known_agents:
        # Removed with this peer, it would be gone for the other one too.
        raise TransferError(
            f"NIXL agent {name} belongs to a connected peer",
            code="duplicate-agent",
            field="nixl_metadata",
            got=name,
            expected="an agent of its own",
        )
    prepared: list[Rows] = []
    try:
        prepared.append(agent.prepare_local(plan.local_rows, plan.local_memory))
        prepared.append(agent.prepare_remote(name, plan.remote_rows, plan.remote_memory))
    except TransferError:
        for rows in prepared:
            agent.release_rows(rows)
        agent.remove_peer(name)
        raise
    return Peer(
        engine_id=handshake.engine_id,
        verdict=verdict,
        description=remote,
        agent_name=name,
        plan=plan,
        local_rows=prepared[0],
        remote_rows=prepared[1],
        conversion=conversion,
        slab=slab,
        max_blocks=max_blocks,
    )


def _in_order_of(layers: Sequence[str], regions: Sequence[Region]) -> list[Region]:
    """Regions in the local order of layers.

    The slab is laid out layer after layer and converted layer by layer: in the peer's own order
    layer 3 could be written over layer 5 without any size being wrong.
    """
    rank = {layer: position for position, layer in enumerate(layers)}
    missing = [layer for region in regions for layer in region.layers if layer not in rank]
    if missing:
        raise PlanError(
            f"the peer has layers that the local cache has not: {', '.join(missing)}",
            code="unknown-layer",
            field="layers",
            got=", ".join(missing),
        )
    return sorted(regions, key=lambda region: min(rank[layer] for layer in region.layers))
