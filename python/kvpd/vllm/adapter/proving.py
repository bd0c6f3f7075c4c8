"""Stock's pull worker, which does for a request only what was proved, and ends it alone.

A request names an engine, an address, ranks and blocks. All of them came through a client. They
are compared with what the engine itself published before anything is sent or read for them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
    NixlConnectorMetadata,
    ReqMeta,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker

from kvpd.errors import RequestError, TransferError
from kvpd.vllm.adapter.groups import groups_of
from kvpd.vllm.adapter.releases import ReceivedNotices, Releases
from kvpd.vllm.asker import Asker, Inquiry
from kvpd.vllm.held import MAX_STARTS, WHAT, Notifiers, Question, agent_digest, content_digest
from kvpd.vllm.pairing import Wanted, check_ids, num_blocks, pair
from kvpd.vllm.published import decode_payload
from kvpd.vllm.reference import Reference, Refusal
from kvpd.vllm.sidechannel import Address, ask
from kvpd.wire import Handshake

# vLLM configures handlers for its own loggers only.
logger = logging.getLogger("vllm.kvpd")

# As long as stock waits for an answer.
_ASK_SECONDS = 5.0


class ProvingWorker(NixlPullConnectorWorker):
    """Stock's worker behind that door. Subclasses say what else a request holds (`_let_go`)."""

    nixl_wrapper: Any
    xfer_stats: Any

    def __init__(
        self,
        vllm_config: Any,
        engine_id: str,
        kv_cache_config: Any,
        held_timeout_seconds: float,
    ) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        self._groups = groups_of(kv_cache_config)
        # Engines that publish a tag, so that their requests bring a proof.
        self._tagged: set[str] = set()
        # Where the handshake that runs for an engine was asked for.
        self._shaking: dict[str, tuple[str, int, int]] = {}
        # Requests for which an idle moment of their peer is waited for.
        self._postponed: list[tuple[str, Any]] = []
        # By engine and rank: where its handshake was asked for, and the start id that it brought.
        self._owners: dict[str, dict[int, tuple[Address, bytes]]] = {}
        self._asker = Asker(held_timeout_seconds)
        # Of each request that is read: what its owner is asked in the end.
        self._inquiries: dict[str, Inquiry] = {}
        self._agent = agent_digest(self.nixl_wrapper.name)
        # New whenever the cache is registered.
        self._start = b""
        self._notifiers = Notifiers()

    def start_load_kv(self, metadata: Any) -> None:
        """As stock, one request after the other."""
        for name, (refusal, waiting) in metadata.kvpd_refused.items():
            self._refuse(name, refusal, waiting)
        postponed, self._postponed = self._postponed, []
        for entry in postponed:
            self._ready_requests.put(entry)
        requests = metadata.reqs_to_recv
        for name, meta in requests.items():
            alone = NixlConnectorMetadata()
            alone.reqs_to_recv = {name: meta}
            with self._alone(name):
                super().start_load_kv(alone)
        metadata.reqs_to_recv = {}
        super().start_load_kv(metadata)
        metadata.reqs_to_recv = requests

    def _read_blocks_for_req(self, req_id: str, meta: Any) -> None:
        """As stock, with blocks that are proved and paired by position."""
        with self._alone(req_id):
            if not self._reach(req_id, meta):
                return
            if self._would_disturb(meta.remote.engine_id, meta):
                self._postponed.append((req_id, meta))
                return
            self._prove(meta)
            self._prepare_inquiry(req_id, meta)
            self._read_proved(req_id, meta)

    def _reach(self, req_id: str, meta: Any) -> bool:
        """Whether a request's peer is connected; where it is not, a handshake is begun."""
        engine_id = meta.remote.engine_id
        if engine_id in self._remote_agents:
            return True
        self._background_nixl_handshake(req_id, engine_id, meta)
        return False

    def _read_proved(self, req_id: str, meta: Any) -> None:
        """Begin to read what was proved, as stock."""
        super()._read_blocks_for_req(req_id, meta)

    def _prove(self, meta: Any) -> None:
        """Compare a request with its peer, and list the blocks that are read, in pairs.

        Raises:
            RequestError: the request fits neither the peer nor our cache.
        """
        reference, wanted = self._asked_for(meta)
        engine_id = reference.engine_id
        info = self.transfer_topo.get_engine_info(engine_id)
        if reference.tp_size != info.remote_tp_size:
            raise _wrong_tp_size(reference.tp_size, info.remote_tp_size)
        check_ids(reference.block_ids, self._num_remote_blocks(engine_id))
        meta.remote.block_ids = [list(ids) for ids in reference.block_ids]
        if not any(meta.local_block_ids):
            # Nothing is read.
            return
        proof = reference.proof
        if engine_id in self._tagged and (proof is None or proof.request is None):
            raise RequestError(
                "kv_transfer_params.kvpd is missing; the router has to pass on kv_transfer_params "
                "as the peer returned them, with what it does not know",
                code="proof-missing",
                field="kv_transfer_params.kvpd",
                got="nothing",
                expected="what the peer returned",
            )
        if self._groups is None:
            # Stock pairs states; our scheduler lets them be read after exactly their last token.
            return
        if wanted is None:
            raise RequestError("blocks wait that our scheduler knows nothing of", code="unproved")
        if self._is_mapped_by_region(engine_id):
            self._check_ends(reference, wanted)
            return
        pairs = [
            pair(
                group,
                local_ids,
                first,
                remote_ids,
                num_tokens=wanted.num_tokens,
                num_remote_tokens=reference.num_tokens,
            )
            for group, local_ids, first, remote_ids in zip(
                self._groups,
                wanted.local_block_ids,
                wanted.first_blocks,
                reference.block_ids,
                strict=True,
            )
        ]
        meta.local_block_ids = tuple(local for local, _ in pairs)
        meta.remote.block_ids = [remote for _, remote in pairs]
        meta.local_physical_block_ids = self._logical_to_kernel_block_ids(
            meta.local_block_ids, self._physical_blocks_per_logical_kv_block
        )

    def _check_ends(self, reference: Reference, wanted: Wanted) -> None:
        """Prove that both sides' lists end with the same block of the sequence.

        Latents that the sides keep in other groups are paired by stock, from the end.
        """
        has, wants = reference.num_tokens, wanted.num_tokens
        if any(num_blocks(has, g) != num_blocks(wants, g) for g in self._groups or ()):
            raise RequestError(
                f"kv_transfer_params.remote_num_tokens is {has}, the request waits for {wants}; "
                "where the sides keep other KV groups they have to end in the same block; start "
                "both with the same settings",
                code="remote-tokens",
                field="kv_transfer_params.remote_num_tokens",
                got=has,
                expected=wants,
            )

    def _asked_for(self, meta: Any) -> tuple[Reference, Wanted | None]:
        """What our scheduler read from the request."""
        found = getattr(meta, "kvpd", None)
        if found is None:
            raise RequestError("the request was not read by kvpd's scheduler", code="unproved")
        reference, wanted = found
        return reference, wanted

    def _num_remote_blocks(self, engine_id: str) -> list[int]:
        """For each of a peer's KV groups, how many blocks it has."""
        info = self.transfer_topo.get_engine_info(engine_id)
        kernel_blocks = info.remote_physical_blocks_per_logical
        count = self.dst_num_blocks[engine_id]
        groups = self.dst_region_group_ids.get(engine_id) or []
        regions = self.dst_region_num_blocks.get(engine_id) or [count] * len(groups)
        num_groups = len(self.kv_cache_config.transfer_groups)
        if self._is_mapped_by_region(engine_id):
            num_groups = 1 + max(groups)
        return [
            # -1: shared by all groups.
            min([count, *(n for n, g in zip(regions, groups, strict=True) if g in (group, -1))])
            // kernel_blocks
            for group in range(num_groups)
        ]

    def _is_mapped_by_region(self, engine_id: str) -> bool:
        remote = self.dst_region_group_ids.get(engine_id) or []
        return bool(remote) and (self.region_group_ids or remote) != remote

    def _would_disturb(self, engine_id: str, meta: Any) -> bool:
        """Whether stock (0.33) would let go of a peer that others read from, at this one's word."""
        known: dict[str, int] | None = getattr(self, "_remote_registration_generations", None)
        if known is None or meta.remote.registration_generation <= known.get(engine_id, 0):
            return False
        return engine_id in self._engines_with_inflight_transfers()

    # ------------------------------------------------------------------ are blocks still held?

    def _note_owner(self, engine_id: str, tp_rank: int, start: bytes | None) -> None:
        """A rank's handshake came; for its thread, before the engine counts as known."""
        shaking = self._shaking.get(engine_id)
        if start is None or shaking is None:
            return
        host, port, _ = shaking
        self._owners.setdefault(engine_id, {})[tp_rank] = (Address(host, port), start)

    def _prepare_inquiry(self, req_id: str, meta: Any) -> None:
        """Note what the owner of a request's blocks is asked once they were read.

        Raises:
            RequestError: the owner answers questions, and one of the ranks that are read is
                unknown.
        """
        reference, _ = self._asked_for(meta)
        owners, proof = self._owners.get(reference.engine_id), reference.proof
        if owners is None or proof is None or proof.request is None:
            return
        if not any(meta.local_block_ids):
            # Nothing is read, and nothing awaited.
            return
        ranks = self.tp_mappings[reference.engine_id].all_source_ranks
        missing = [rank for rank in ranks if rank not in owners]
        if missing or len(ranks) > MAX_STARTS:
            raise RequestError(
                f"ranks {missing or len(ranks)} of {reference.engine_id} cannot be asked whether "
                "they hold the blocks",
                code="unproved",
                field="tp_rank",
                got=list(ranks)[:16],
                expected=f"{MAX_STARTS} ranks at most, all of which shook hands",
            )
        question = Question(
            WHAT,
            0,
            tuple(owners[rank][1] for rank in ranks),
            bytes.fromhex(proof.request),
            content_digest(
                reference.block_ids, reference.num_tokens, proof.num_tokens, proof.prompt
            ),
            self._agent,
        )
        # One handshake asks all ranks at one address.
        self._inquiries[req_id] = Inquiry(owners[ranks[0]][0], question)

    def _get_new_notifs(self) -> set[str]:
        """As stock; whose notices they are goes to the scheduler, which answers by it."""
        native: Any = self.nixl_wrapper
        observer: ReceivedNotices | None = None
        with self.going_on():
            observer = ReceivedNotices(native)
            self.nixl_wrapper = observer
        try:
            released: set[str] = super()._get_new_notifs()
        finally:
            self.nixl_wrapper = native
        with self.going_on():
            if observer is not None:
                self._notifiers.note(observer.notices, released, self._reqs_to_process)
        return released

    def take_releases(self) -> Releases | None:
        """Whose notices made this rank give blocks back since the last call."""
        agents = self._notifiers.take()
        return Releases({self._start: agents}) if agents else None

    # ------------------------------------------------------------------ handshakes

    def _ensure_handshake(
        self, engine_id: str, host: str, port: int, tp_size: int, *more: Any, **options: Any
    ) -> Any:
        """As stock; where a handshake that begins was asked for is remembered."""
        with self._handshake_lock:
            if engine_id not in self._handshake_futures and engine_id not in self._remote_agents:
                self._shaking[engine_id] = (host, port, tp_size)
            return super()._ensure_handshake(engine_id, host, port, tp_size, *more, **options)

    def _background_nixl_handshake(self, req_id: str, remote_engine_id: str, meta: Any) -> None:
        """As stock, but what a handshake at another address comes to says nothing of this one."""
        asked_at = (meta.remote.host, meta.remote.port, meta.tp_size)
        with self._handshake_lock:
            running = self._handshake_futures.get(remote_engine_id)
            is_another = self._shaking.get(remote_engine_id) != asked_at
        if running is not None and is_another:
            running.add_done_callback(lambda _: self._ready_requests.put((req_id, meta)))
        else:
            super()._background_nixl_handshake(req_id, remote_engine_id, meta)

    def _nixl_handshake(
        self, host: str, port: int, remote_tp_size: int, *more: Any, **options: Any
    ) -> Any:
        """As stock, but no rank is asked for that the engine may not have.

        The listener of a stock engine ends at such a question, and with it every later handshake.
        """
        targets = self.transfer_topo.handshake_target_ranks(remote_tp_size)
        if targets != [0]:
            # Rank 0 always exists.
            address = Address(host, port)
            first = decode_payload(ask(address, 0, timeout_seconds=_ASK_SECONDS))
            self._check_tp_size(first.handshake(), first.metadata.block_lens, remote_tp_size)
        return super()._nixl_handshake(host, port, remote_tp_size, *more, **options)

    def _check_tp_size(
        self, handshake: Handshake | None, block_lens: list[int], tp_size: int
    ) -> None:
        """Prove by one of its ranks that an engine has so many.

        A stock engine does not say. With other ranks its blocks would have another length, unless
        every rank holds the same.

        Args:
            handshake: what it publishes; None for a stock engine.
            block_lens: bytes of a block, for each of its regions.
            tp_size: how many ranks a request says it has.

        Raises:
            RequestError: it has another number, or that cannot be known.
        """
        if handshake is not None:
            has = handshake.description.facts.tp_size
            if has != tp_size:
                raise _wrong_tp_size(tp_size, has)
            return
        ours = [length * self.world_size for length in self.block_len_per_layer]
        is_proved = ours == [length * tp_size for length in block_lens]
        if not is_proved and tp_size != self.world_size:
            raise RequestError(
                f"kv_transfer_params.tp_size is {tp_size}; the peer does not say how many ranks "
                f"it has, and its blocks are not those of {tp_size}; use one tensor-parallel size "
                "on both sides, or load kvpd's connector on the peer",
                code="tp-size",
                field="kv_transfer_params.tp_size",
                got=tp_size,
                expected=self.world_size,
            )

    # ------------------------------------------------------------------ endings

    @contextmanager
    def _alone(self, req_id: str) -> Iterator[None]:
        """Let an exception end this request, and nothing else."""
        try:
            yield
        except Exception as error:
            logger.debug("%s", req_id, exc_info=True)
            self._fail(req_id, error)

    @contextmanager
    def going_on(self) -> Iterator[None]:
        """Say an exception that is no request's. What was not done is tried in the next step."""
        try:
            yield
        except Exception:
            logger.exception("an error that does not end the engine")

    def _fail(self, req_id: str, error: BaseException) -> None:
        """End a request; it is reported once nothing can write its blocks any more."""
        with self.going_on():
            refusal = Refusal.of(error)
            logger.error("%s: %s: %s", req_id, refusal.code, refusal.reason)
            self.xfer_stats.record_failed_request(refusal.code)
        with self.going_on():
            self._let_go(req_id)
        if req_id not in self._recving_metadata:
            # Nothing is awaited: all that it needs is here.
            return
        if isinstance(error, TransferError):
            self._handle_failed_transfer(req_id, None, self._recv_failures)
        else:
            self._recv_failures.add(req_id)

    def _refuse(
        self, req_id: str, refusal: Refusal, waiting: Sequence[Sequence[int]] | None
    ) -> None:
        """Report that what a refused request waits for did not come; nothing was begun for it."""
        if waiting is not None:
            self._recving_metadata[req_id] = ReqMeta(waiting, waiting, tp_size=1)
        self._fail(req_id, RequestError(refusal.reason, code=refusal.code))

    def get_block_ids_with_load_errors(self) -> set[int]:
        """As stock for one KV group. Of several vLLM takes requests, and blocks end its engine."""
        blocks: set[int] = super().get_block_ids_with_load_errors()
        return blocks if len(self.kv_cache_config.kv_cache_groups) == 1 else set()

    def _let_go(self, req_id: str) -> None:
        """A request ends; idempotent."""
        self._inquiries.pop(req_id, None)
        self._asker.forget(req_id)

    def shutdown(self) -> None:
        """As stock; nobody is asked any more."""
        asker = getattr(self, "_asker", None)
        if asker is not None:
            asker.close()
        super().shutdown()


def _wrong_tp_size(got: int, expected: int) -> RequestError:
    return RequestError(
        f"kv_transfer_params.tp_size is {got}; the peer has {expected}; pass on "
        "kv_transfer_params as the peer returned them",
        code="tp-size",
        field="kv_transfer_params.tp_size",
        got=got,
        expected=expected,
    )
