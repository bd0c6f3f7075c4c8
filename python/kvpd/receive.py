"""The receive pipeline: plan, READ, convert, ready. It knows no engine.

A request's blocks belong to the receiver from `Receiver.start` until its outcome is returned by
`Receiver.poll`; until then something may write them. Calls come from one thread, except that
`Receiver.add_peer` may run on another. A thread of the receiver's own looks after peers whose
memory is mapped: an idle engine does not poll, and a prefill that ends waits for its memory.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from kvpd._kvpd import Claims, EngineDescription, LinkModel, Verdict, negotiate, runs
from kvpd.connect import Site, connect
from kvpd.convert import ConversionQueue, Pages, registered_pairs
from kvpd.errors import PlanError, RefusedError, TransferError
from kvpd.nixl import Agent
from kvpd.peer import Peer
from kvpd.pipeline import Pipeline
from kvpd.request import FailureCode, HeldCheck, Outcome, Request
from kvpd.staging import Slab
from kvpd.wire import Handshake

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

PlacementChoice = Literal["in_place", "staged", "planned"]
BlockIds = Sequence[int] | NDArray[np.integer[Any]]

# Well within the seconds for which a prefill waits, and vLLM for it.
LOOK_SECONDS = 0.25


class Receiver:
    """Reads pages from peers into one cache.

    Args:
        agent: a NIXL agent with which the cache is already registered.
        description: our own facts and regions.
        storages: tensors whose storage the regions lie in.
        convert: accept peers whose page format is another one, where the policy has the pair.
        direct: read the memory of peers that offer it with the conversion itself, on this host and
            over CUDA, also where the formats are equal. A pair that cannot is served otherwise.
        placement: where raw pages of other peers may land: "in_place" in the cache itself (no
            memory, but short descriptors, and a failed READ leaves torn blocks), "staged" in a slab
            (dense descriptors, and raw pages never touch the cache), "planned" in whichever is
            faster. Equal pages are read into the cache.
        slab_bytes: size of the slab, at least a page of one layer; requests of any size pass
            through it in chunks.
        num_slots: slots of the slab, of which each chunk takes one; fewer where it has fewer pages.
        max_pages: blocks of the largest request; the cache's blocks if None.
        link: what transfers cost; defaults for the cache's kind of memory if None.
        require_tagged: refuse peers that published nothing of kvpd's.
        allow_other_weights: read from peers whose weights differ or are quantised otherwise.
        clock: seconds; deadlines are readings of it.

    Raises:
        TransferError: the slab cannot be registered.
        PlanError: an unknown placement, "staged" without `slab_bytes`, or conversion without
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
        direct: bool = False,
        placement: PlacementChoice = "in_place",
        slab_bytes: int = 0,
        num_slots: int = 4,
        max_pages: int | None = None,
        link: LinkModel | None = None,
        require_tagged: bool = False,
        allow_other_weights: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if placement not in ("in_place", "staged", "planned"):
            raise PlanError(
                f"no placement {placement!r}",
                code="placement",
                field="placement",
                got=placement,
                expected="in_place, staged or planned",
            )
        self._agent = agent
        self._description = description
        self._convert = convert
        self._require_tagged = require_tagged
        self._allow_other_weights = allow_other_weights
        self._clock = clock
        pages: Pages | None = None
        queue: ConversionQueue | None = None
        self._slab: Slab | None = None
        if (convert or direct) and description.format is not None:
            if not storages:
                raise PlanError(
                    "conversion needs the cache's tensors", code="no-storages", field="storages"
                )
            device = storages[0].device
            pages = Pages.of(description.format, description.regions, storages)
            queue = ConversionQueue(device)
            if convert and placement != "in_place":
                self._slab = Slab(
                    agent, slab_bytes, num_slots, description.format.page_bytes, device
                )
        self._site = Site(
            agent=agent,
            description=description,
            pages=pages,
            slab=self._slab,
            link=LinkModel(description.regions[0].memory) if link is None else link,
            max_pages=description.num_blocks if max_pages is None else max_pages,
            in_place=placement != "staged",
            direct=direct,
        )
        self._pipeline = Pipeline(agent, queue, clock)
        self._peers: dict[tuple[str, int], Peer] = {}
        self._adding = threading.Lock()
        # Held by whoever starts to read a mapped peer, and by whoever unmaps one.
        self._mapped = threading.Lock()
        self._looking: threading.Thread | None = None
        self._stop_looking = threading.Event()
        self._is_closed = False
        self._live: dict[str, Request] = {}
        self._claims = Claims(description.num_blocks)
        self._outcomes: list[Outcome] = []

    def add_peer(self, handshake: Handshake | None, *, must_be_direct: bool = False) -> Peer:
        """Judge a peer, and prepare everything its requests share if it is accepted.

        Args:
            handshake: from `kvpd.wire.decode`; None for an untagged peer.
            must_be_direct: where the peer's memory cannot be read directly, leave it alone.

        Raises:
            DirectError: why it `must_be_direct` and cannot be.
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
            allow_other_weights=self._allow_other_weights,
            converters=registered_pairs(),
        )
        if verdict.kind == "refuse":
            raise RefusedError(verdict)
        for warning in verdict.warnings:
            logger.warning("%s: %s %s", warning.code, warning.field, warning.remedy)
        if handshake is None:
            raise TransferError("an untagged peer published no regions", code="untagged-peer")
        with self._adding:
            if self._is_closed:
                raise TransferError("the receiver is closed", code="closed", field="receiver")
            return self._add(handshake, verdict, must_be_direct)

    def _add(self, handshake: Handshake, verdict: Verdict, must_be_direct: bool) -> Peer:
        key = (handshake.engine_id, handshake.description.facts.tp_rank)
        if key in self._peers:
            raise TransferError(
                f"peer {key[0]} rank {key[1]} is connected; remove it first",
                code="duplicate-peer",
                field="engine_id",
                got=key[0],
            )
        known = [peer.agent_name for peer in list(self._peers.values())]
        peer = connect(self._site, handshake, verdict, known, must_be_direct=must_be_direct)
        self._peers[key] = peer
        if peer.mapping is not None and self._looking is None:
            self._looking = threading.Thread(
                target=self._look_after_peers, name="kvpd-peers", daemon=True
            )
            self._looking.start()
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
        is_held: HeldCheck | None = None,
    ) -> None:
        """Begin to read remote block i into local block i, for every i.

        Args:
            request_id: unique among live requests.
            peer: from `add_peer`.
            local_ids: blocks of our cache; they belong to the request until it has its outcome.
            remote_ids: blocks of the peer's cache, as many.
            deadline: reading of the receiver's clock from which on the peer may reuse its blocks.
                With `is_held` it only decides not to begin.
            notice: what is sent to the peer, once, after everything was read and converted;
                the request id if None.
            is_held: called once everything was read, by `poll`, until it says whether the peer
                still held the blocks. It must not wait. The request is ready, and the notice sent,
                only after "held". None: the deadline decides.

        Raises:
            PlanError: ids do not pair, repeat, lie outside a cache or belong to a live request.
                Nothing was started.
            TransferError: the request is live already, or the peer is not connected.
        """
        if self.is_live(request_id):
            raise TransferError(
                f"request {request_id} is live",
                code="duplicate-request",
                field="request_id",
                got=request_id,
            )
        with self._mapped:
            if peer.is_leaving or not peer.is_offered or not self.is_connected(peer):
                raise TransferError(
                    f"peer {peer.engine_id} is not connected",
                    code="unknown-peer",
                    field="peer",
                    got=peer.engine_id,
                )
            request = self._prepare(request_id, peer, local_ids, remote_ids, deadline, notice)
            request.is_held = is_held
            # From here on the peer is in use.
            self._live[request_id] = request
        if self._slab is not None and request.plan.placement == "staged":
            self._slab.enqueue(request_id)
        self._advance(request)
        self._hand_out_slots()

    def _prepare(
        self,
        request_id: str,
        peer: Peer,
        local_ids: BlockIds,
        remote_ids: BlockIds,
        deadline: float | None,
        notice: bytes | None,
    ) -> Request:
        """A request that has its blocks, and has not begun."""
        pages = runs(local_ids, remote_ids)
        plan = peer.planner.plan(pages)
        request = Request(
            request_id=request_id,
            peer=peer,
            plan=plan,
            runs=pages,
            notice=request_id.encode() if notice is None else notice,
            deadline=deadline,
            queued_at=self._clock(),
            waiting=deque(peer.chunks(plan, pages)),
        )
        self._claims.claim(pages)
        return request

    def poll(self) -> list[Outcome]:
        """Drive every live request and return those that have ended since the last call."""
        for request in list(self._live.values()):
            self._advance(request)
        self._hand_out_slots()
        self._disconnect_leaving()
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def extend(self, request_id: str, deadline: float) -> None:
        """The peer keeps a request's blocks for longer than it was started with.

        A deadline is never moved to an earlier one, and a request without one has none after it.
        What has ended already is left alone.
        """
        request = self._live.get(request_id)
        if request is not None and request.deadline is not None:
            request.deadline = max(request.deadline, deadline)

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

    def is_connected(self, peer: Peer) -> bool:
        """Whether a peer has not been let go of; one that leaves stays until nothing reads it."""
        return any(peer is known for known in list(self._peers.values()))

    def is_live(self, request_id: str) -> bool:
        """Whether a request has not been among the outcomes yet."""
        return request_id in self._live or any(o.request_id == request_id for o in self._outcomes)

    @property
    def num_live(self) -> int:
        """Requests that have no outcome yet."""
        return len(self._live)

    @property
    def slab_use(self) -> float | None:
        """Fraction of the slab's slots that are taken; None without a slab."""
        return None if self._slab is None else self._slab.use

    def close(self, *, timeout_seconds: float = 5.0) -> list[Outcome]:
        """Abort what is live, wait until nothing is written any more, and let everything go.

        Raises:
            TransferError: a READ could not be stopped in time. Its memory must stay; the receiver
                is as it was, and `close` may be called again.
        """
        with self._adding:
            self._is_closed = True
        self._stop_looking.set()
        if self._looking is not None:
            self._looking.join()
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
        if self._slab is not None and not self._slab.lost:
            self._slab.close(self._agent)
            self._slab = None
        return outcomes

    def _advance(self, request: Request) -> None:
        """Move a request on; an exception ends it, and no other one.

        One that cannot even be ended keeps its blocks: it may still be written.
        """
        try:
            self._move(request)
        except Exception as error:
            if request.failure is None:
                logger.error("%s: %s", request.request_id, error, exc_info=True)
            self._pipeline.fail(request, "internal-error", f"{type(error).__name__}: {error}")

    def _move(self, request: Request) -> None:
        """Move a request on, without slots, and collect its outcome if it has ended."""
        self._pipeline.check_deadline(request)
        while request.waiting and self._pipeline.can_begin(request.waiting[0]):
            self._pipeline.begin(request)
        for chunk in self._pipeline.advance(request):
            if self._slab is not None and chunk.slot is not None:
                self._slab.give_back(chunk.slot)
        if self._slab is not None and not request.waiting:
            self._slab.withdraw(request.request_id)
        outcome = self._pipeline.outcome(request)
        if outcome is not None:
            del self._live[request.request_id]
            self._claims.release(request.runs)
            self._outcomes.append(outcome)

    def _hand_out_slots(self) -> None:
        slab = self._slab
        while slab is not None and (request_id := slab.whose_turn()) is not None:
            request = self._live[request_id]
            self._pipeline.check_deadline(request)
            if slab.lost:
                self._pipeline.fail(request, "conversion-failed", slab.lost)
            if request.waiting:
                self._pipeline.begin(request, slab.take(request_id))
            # Ends its turns when nothing of it waits any more.
            self._advance(request)

    def _end(self, request: Request, code: FailureCode, reason: str) -> None:
        self._pipeline.fail(request, code, reason)
        self._advance(request)

    def _look_after_peers(self) -> None:
        """Unmap peers that withdrew, each once nothing reads it; `poll` does the rest."""
        while not self._stop_looking.wait(LOOK_SECONDS):
            for peer in list(self._peers.values()):
                if not peer.is_offered:
                    with self._mapped:
                        peer.is_leaving = True
                        if not self._is_read(peer):
                            peer.unmap()

    def _disconnect_leaving(self) -> None:
        for key, peer in list(self._peers.items()):
            if peer.is_leaving and not self._is_read(peer):
                # Known until it is gone: the handshake thread must not add the agent again while
                # it is being removed here.
                with self._mapped:
                    peer.disconnect(self._agent)
                del self._peers[key]

    def _is_read(self, peer: Peer) -> bool:
        return any(request.peer is peer for request in list(self._live.values()))
