"""The end of a handshake: an accepted peer, prepared for all of its requests."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvpd._kvpd import EngineDescription, LinkModel, PageFormat, Planner, Verdict
from kvpd.convert import DIRECT, Conversion, Pages, prepare
from kvpd.direct import Mapping, map_peer
from kvpd.errors import (
    ConversionError,
    DirectError,
    MissingDependencyError,
    PlanError,
    RefusedError,
    TransferError,
)
from kvpd.nixl import Agent, AgentName
from kvpd.peer import Conversions, Peer, RowPair

if TYPE_CHECKING:
    from kvpd.staging import Slab
    from kvpd.wire import Handshake
    from kvpd.words import Placement


@dataclass(frozen=True)
class Site:
    """What all peers of one cache have in common.

    Attributes:
        agent: reads from peers.
        description: our own facts and regions.
        pages: our own cache; needed to convert into it.
        slab: where staged pages land.
        link: what transfers cost.
        max_pages: blocks of the largest request.
        in_place: raw pages may land in the cache.
        direct: read the memory of peers that offer it.
    """

    agent: Agent
    description: EngineDescription
    pages: Pages | None
    slab: Slab | None
    link: LinkModel
    max_pages: int
    in_place: bool
    direct: bool = False


def connect(
    site: Site,
    handshake: Handshake,
    verdict: Verdict,
    known_agents: Collection[AgentName],
    *,
    must_be_direct: bool,
) -> Peer:
    """Prepare an accepted peer. On an error nothing of the peer stays registered.

    Args:
        site: our side.
        handshake: what the peer published.
        verdict: the accepted verdict over the two.
        known_agents: NIXL agents of connected peers.
        must_be_direct: prepare nothing else where the peer's memory cannot be read directly.

    Raises:
        DirectError: why it `must_be_direct` and cannot be.
        RefusedError: the verdict is no acceptance.
        PlanError, ConversionError: the pair cannot be planned or converted.
        TransferError: NIXL refuses the peer or its rows, or its agent is another peer's.
    """
    if verdict.kind == "refuse":
        raise RefusedError(verdict)
    agent = site.agent
    with ExitStack() as undo:
        prepared, why_not = None, ""
        if site.direct or must_be_direct:
            try:
                prepared = _prepare_direct(site, handshake, verdict)
            except DirectError as error:
                if must_be_direct:
                    raise
                why_not = str(error)
        if prepared is None:
            prepared = _prepare(site, handshake, verdict, None)
        planner, mapping = prepared.planner, prepared.mapping
        if mapping is not None:
            undo.callback(mapping.close)
        name = agent.add_peer(handshake.nixl_metadata)
        if name in known_agents:
            # Removed with this peer, it would be gone for the other one too.
            raise TransferError(
                f"NIXL agent {name!r} belongs to a connected peer",
                code="duplicate-agent",
                field="nixl_metadata",
                got=name,
                expected="an agent of its own",
            )
        undo.callback(agent.remove_peer, name)
        rows: dict[Placement, RowPair] = {}
        for placement in planner.placements:
            if placement != "direct":
                plan = planner.rows(placement)
                local = agent.prepare_local(plan.local_rows, plan.local_memory)
                undo.callback(agent.release_rows, local)
                remote = agent.prepare_remote(name, plan.remote_rows, plan.remote_memory)
                undo.callback(agent.release_rows, remote)
                rows[placement] = RowPair(local, remote)
        undo.pop_all()
    return Peer(
        engine_id=handshake.engine_id,
        verdict=verdict,
        description=handshake.description,
        agent_name=name,
        planner=planner,
        conversions=prepared.conversions,
        rows=rows,
        slab=prepared.slab,
        mapping=mapping,
        why_not_direct=why_not,
    )


@dataclass(frozen=True)
class _Prepared:
    """What needs nothing of NIXL's."""

    planner: Planner
    conversions: Conversions
    slab: Slab | None
    mapping: Mapping | None


def _prepare_direct(site: Site, handshake: Handshake, verdict: Verdict) -> _Prepared:
    """Map the peer and prepare to convert from there. On an error nothing stays mapped.

    Raises:
        DirectError: it cannot be mapped, or no kernel takes pages that lie as they do.
    """
    mapping = _map(site, handshake)
    with ExitStack() as undo:
        undo.callback(mapping.close)
        try:
            prepared = _prepare(site, handshake, verdict, mapping)
        except (ConversionError, MissingDependencyError, PlanError) as error:
            raise DirectError(
                f"its pages cannot be read by a kernel: {error}",
                code=error.code,
                field=error.field,
                got=error.got,
                expected=error.expected,
            ) from error
        undo.pop_all()
    return prepared


def _prepare(
    site: Site, handshake: Handshake, verdict: Verdict, mapping: Mapping | None
) -> _Prepared:
    converts = verdict.kind == "convert"
    # Equal pages land where they stay: they never pass through the slab.
    slab = site.slab if converts and mapping is None else None
    planner = Planner(
        site.description.regions,
        handshake.description.regions,
        link=site.link,
        max_pages=site.max_pages,
        slab=None if slab is None else slab.region,
        num_slots=1 if slab is None else slab.num_slots,
        in_place=mapping is None and (site.in_place or not converts),
        direct=mapping is not None,
    )
    conversions = _conversions(site, planner, verdict.source, slab, mapping)
    for conversion in (c for cuts in conversions.values() for cut in cuts for c in cut):
        # Here, on the handshake: the first request must not wait for a compiler.
        conversion.warm_up()
    return _Prepared(planner, conversions, slab, mapping)


def _map(site: Site, handshake: Handshake) -> Mapping:
    """The peer's memory. Raises `DirectError`."""
    if site.pages is None:
        raise DirectError(
            "the local pages have no one format", code="mixed-local-formats", field="page_format"
        )
    if handshake.direct is None:
        raise DirectError("the peer does not offer its memory", code="no-offer", field="direct")
    # In our order of layers: in the peer's own, layer 3 could be written over layer 5 without any
    # size being wrong.
    names = dict.fromkeys(region.layers for region in site.description.regions)
    order = {layers: position for position, layers in enumerate(names)}
    regions = sorted(handshake.description.regions, key=lambda region: order[region.layers])
    return map_peer(handshake.direct, regions, site.description.regions[0].device)


def _conversions(
    site: Site,
    planner: Planner,
    source: PageFormat | None,
    slab: Slab | None,
    mapping: Mapping | None,
) -> Conversions:
    """By placement and cut, the conversions of its groups of layers.

    Args:
        source: the peer's format; None if it is ours.
        slab, mapping: as the planner was made with.
    """
    pages = site.pages
    found: dict[Placement, tuple[tuple[Conversion, ...], ...]] = {}
    if pages is None:
        if source is not None:
            raise PlanError("no pages to convert into", code="no-pages", field="storages")
        return found
    if mapping is not None:
        theirs = Pages.of(source or pages.format, mapping.regions, mapping.storages)
        found["direct"] = ((prepare(theirs, pages, tuning=DIRECT),),)
    if source is not None and "in_place" in planner.placements:
        # The same memory seen as the peer's pages: the raw bytes lie in the local pieces.
        found["in_place"] = ((prepare(pages.seen_as(source), pages),),)
    if source is not None and slab is not None:
        _check_slots(planner, slab, source, pages.format)
        found["staged"] = tuple(
            tuple(
                _from_slab(pages, source, planner, slab, number, group)
                for group in range(cut.num_groups)
            )
            for number, cut in enumerate(planner.cuts)
        )
    return found


def _from_slab(
    pages: Pages, source: PageFormat, planner: Planner, slab: Slab, cut: int, group: int
) -> Conversion:
    """From the slots, filled with a group of layers, to these layers of the cache."""
    step = planner.cuts[cut].group_layers
    return prepare(
        Pages.of(source, planner.slab_regions(cut, group), [slab.tensor]),
        Pages(pages.format, pages.layers[group * step : (group + 1) * step]),
    )


def _check_slots(planner: Planner, slab: Slab, source: PageFormat, target: PageFormat) -> None:
    """Raise `PlanError` unless slot s of this peer is slot s of every other peer.

    Where slots begin follows from the length of a page; another one would move them into others.
    """
    for field, got, expected in (
        ("page_bytes", source.page_bytes, target.page_bytes),
        ("num_slots", planner.num_slots, slab.num_slots),
    ):
        if got != expected:
            raise PlanError(
                f"the slab cannot be shared with this peer: {field} is {got}, not {expected}",
                code="slab-not-shared",
                field=field,
                got=got,
                expected=expected,
            )
