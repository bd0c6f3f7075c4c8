"""The receive pipeline: plan, READ, convert, ready. It knows no engine.

A request's blocks belong to the receiver from `Receiver.start` until its outcome is returned by
`Receiver.poll`; until then something may write them. Calls come from one thread, except that
`Receiver.add_peer` may run on another.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from kvpd._kvpd import EngineDescription, Verdict, negotiate, runs
from kvpd.convert import ConversionQueue, Pages
from kvpd.errors import PlanError, RefusedError, TransferError
from kvpd.nixl import Agent
from kvpd.peer import Peer, connect
from kvpd.pipeline import Pipeline
from kvpd.request import FailureCode, Outcome, Request
from kvpd.staging import Slab
from kvpd.wire import Handshake

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

Placement = Literal["in_place", "staged"]
BlockIds = Sequence[int] | NDArray[np.integer[Any]]


class Receiver:
    """Reads pages from peers into one cache.

    Args:
        agent: a NIXL agent with which the cache is already registered.
        description: our own facts and regions.
        storages: tensors whose storage the regions lie in.
        convert: accept peers whose page format is another one, where the policy has the pair.
        placement: where raw pages of such peers land: "in_place" in the cache itself (no memory,
            but a failed READ leaves torn blocks), "staged" in a slab (dense descriptors, and a
            failed READ never touches the cache). Peers with equal pages are read into the cache.
        slab_pages: capacity of the slab; the largest request that "staged" can serve.
        require_tagged: refuse peers that published nothing of kvpd's.
        clock: seconds; deadlines are readings of it.

    Raises:
        TransferError: the slab cannot be registered.
        PlanError: an unknown placement, "staged" without `slab_pages`, or conversion without
            `storages`.
        ConversionError: the regions lie in none of `storages`.
    """

    def __init__(
        self,
        agent: Agent,
        description: EngineDescription,
        storages: Sequence[torch.Tensor],
        *,
        convert: bool = False,
        placement: Placement = "in_place",
        slab_pages: int = 0,
        require_tagged: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if placement not in ("in_place", "staged"):
            raise PlanError(
                f"no placement {placement!r}",
                code="placement",
                field="placement",
                got=placement,
                expected="in_place or staged",
            )
        self._agent = agent
        self._description = description
        self._convert = convert
        self._require_tagged = require_tagged
        self._clock = clock
        self._pages: Pages | None = None
        queue: ConversionQueue | None = None
        self._slab: Slab | None = None
        if convert and description.format is not None:
            if not storages:
                raise PlanError(
                    "conversion needs the cache's tensors", code="no-storages", field="storages"
                )
            device = storages[0].device
            self._pages = Pages.of(description.format, description.regions, storages)
            queue = ConversionQueue(device)
            if placement == "staged":
                if slab_pages < 1:
                    raise PlanError(
                        "placement staged needs a slab of at least one page",
                        code="slab-pages",
                        field="slab_pages",
                        got=slab_pages,
                        expected="at least 1",
                    )
                self._slab = Slab(agent, description.regions, slab_pages, device)
        self._pipeline = Pipeline(agent, queue, clock)
        self._peers: dict[tuple[str, int], Peer] = {}
        self._adding = threading.Lock()
        self._live: dict[str, Request] = {}
        self._busy_blocks: set[int] = set()
        self._outcomes: list[Outcome] = []

    def add_peer(self, handshake: Handshake | None) -> Peer:
        """Judge a peer, and prepare everything its requests share if it is accepted.

        Args:
            handshake: from `kvpd.wire.decode`; None for an untagged peer.

        Raises:
            RefusedError: the verdict, with every reason; nothing of the peer was registered.
            TransferError: NIXL refuses it, the peer is known already, or it is untagged and was
                accepted: only whoever knows its own protocol can read from it.
            PlanError, ConversionError: the pair cannot be planned or converted.
        """
        verdict = negotiate(
            self._description,
            None if handshake is None else handshake.description,
            convert=self._convert,
            require_tagged=self._require_tagged,
        )
        if verdict.kind == "refuse":
            raise RefusedError(verdict)
        for warning in verdict.warnings:
            logger.warning("%s: %s %s", warning.code, warning.field, warning.remedy)
        if handshake is None:
            raise TransferError("an untagged peer published no regions", code="untagged-peer")
        with self._adding:
            return self._add(handshake, verdict)

    def _add(self, handshake: Handshake, verdict: Verdict) -> Peer:
        key = (handshake.engine_id, handshake.description.facts.tp_rank)
        if key in self._peers:
            raise TransferError(
                f"peer {key[0]} rank {key[1]} is connected; remove it first",
                code="duplicate-peer",
                field="engine_id",
                got=key[0],
            )
        peer = connect(
            self._agent,
            self._description,
            self._pages,
            handshake,
            verdict,
            self._slab,
            [known.agent_name for known in list(self._peers.values())],
        )
        self._peers[key] = peer
        return peer

    def remove_peer(self, peer: Peer) -> None:
        """Fail the peer's requests and disconnect once none of them can be written any more."""
        peer.is_leaving = True
        for request in [r for r in self._live.values() if r.peer is peer]:
            self._end(request, "peer-removed", f"peer {peer.engine_id} was removed")
        self._disconnect_leaving()

    def start(
        self,
        request_id: str,
        peer: Peer,
        local_ids: BlockIds,
        remote_ids: BlockIds,
        *,
        deadline: float | None = None,
        notice: bytes | None = None,
    ) -> None:
        """Begin to read remote block i into local block i, for every i.

        Args:
            request_id: unique among live requests.
            peer: from `add_peer`.
            local_ids: blocks of our cache; they belong to the request until it has its outcome.
            remote_ids: blocks of the peer's cache, as many.
            deadline: reading of the receiver's clock from which on the peer may reuse its blocks.
            notice: what is sent to the peer, once, after everything was read and converted;
                the request id if None.

        Raises:
            PlanError: ids do not pair, repeat, lie outside a cache, belong to a live request, or
                are more than the slab holds. Nothing was started.
            TransferError: the request is live already, or the peer is not connected.
        """
        if request_id in self._live or any(o.request_id == request_id for o in self._outcomes):
            raise TransferError(
                f"request {request_id} is live",
                code="duplicate-request",
                field="request_id",
                got=request_id,
            )
        if peer.is_leaving or all(peer is not known for known in list(self._peers.values())):
            raise TransferError(
                f"peer {peer.engine_id} is not connected",
                code="unknown-peer",
                field="peer",
                got=peer.engine_id,
            )
        pages = runs(local_ids, remote_ids)
        _check_inside("local_ids", pages.local_ids, self._description.num_blocks)
        _check_inside("remote_ids", pages.remote_ids, peer.description.num_blocks)
        if pages.num_pages > peer.max_blocks:
            raise PlanError(
                f"{pages.num_pages} blocks do not fit a slab of {peer.max_blocks}",
                code="larger-than-slab",
                field="local_ids",
                got=pages.num_pages,
                expected=f"at most {peer.max_blocks}",
            )
        blocks = set(pages.local_ids.tolist())
        if taken := self._busy_blocks & blocks:
            raise PlanError(
                f"blocks of a live request: {sorted(taken)[:8]}",
                code="blocks-in-flight",
                field="local_ids",
                got=sorted(taken),
            )
        request = Request(
            request_id=request_id,
            peer=peer,
            runs=pages,
            notice=request_id.encode() if notice is None else notice,
            deadline=deadline,
            queued_at=self._clock(),
        )
        self._busy_blocks |= blocks
        self._live[request_id] = request
        if peer.slab is not None:
            peer.slab.enqueue(request_id)
        self._advance(request)

    def poll(self) -> list[Outcome]:
        """Drive every live request and return those that have ended since the last call."""
        for request in list(self._live.values()):
            self._advance(request)
        self._disconnect_leaving()
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def abort(self, request_id: str) -> None:
        """End a live request early; `poll` reports it failed once nothing writes its blocks.

        Raises:
            TransferError: no such live request.
        """
        request = self._live.get(request_id)
        if request is None:
            raise TransferError(
                f"request {request_id} is not live",
                code="unknown-request",
                field="request_id",
                got=request_id,
            )
        self._end(request, "aborted", "aborted by the engine")

    @property
    def num_live(self) -> int:
        """Requests that have no outcome yet."""
        return len(self._live)

    def close(self, *, timeout_seconds: float = 5.0) -> list[Outcome]:
        """Abort what is live, wait until nothing is written any more, and let everything go.

        Raises:
            TransferError: a READ could not be stopped in time. Its memory must stay; the receiver
                is as it was, and `close` may be called again.
        """
        for peer in list(self._peers.values()):
            self.remove_peer(peer)
        outcomes = self.poll()
        give_up_at = time.monotonic() + timeout_seconds
        while self._live and time.monotonic() < give_up_at:
            time.sleep(0.001)
            outcomes += self.poll()
        if self._live:
            self._outcomes = outcomes + self._outcomes
            raise TransferError(
                f"still written: {', '.join(self._live)}",
                code="transfers-active",
                field="request_id",
                got=", ".join(self._live),
            )
        if self._slab is not None:
            self._slab.close(self._agent)
            self._slab = None
        return outcomes

    def _advance(self, request: Request) -> None:
        outcome = self._pipeline.advance(request)
        if outcome is None:
            return
        del self._live[request.request_id]
        self._busy_blocks.difference_update(request.blocks())
        self._outcomes.append(outcome)
        if request.peer.slab is not None:
            request.peer.slab.leave(request.request_id)

    def _end(self, request: Request, code: FailureCode, reason: str) -> None:
        self._pipeline.fail(request, code, reason)
        self._advance(request)

    def _disconnect_leaving(self) -> None:
        in_use = {id(request.peer) for request in self._live.values()}
        for key, peer in list(self._peers.items()):
            if peer.is_leaving and id(peer) not in in_use:
                del self._peers[key]
                peer.disconnect(self._agent)


def _check_inside(field: str, ids: NDArray[np.int32], num_blocks: int) -> None:
    """Raise `PlanError` unless all ids are below `num_blocks`; negative ones are refused before."""
    if ids.size and int(ids.max()) >= num_blocks:
        raise PlanError(
            f"{field}: block {int(ids.max())} of a cache of {num_blocks}",
            code="block-out-of-range",
            field=field,
            got=int(ids.max()),
            expected=f"below {num_blocks}",
        )
