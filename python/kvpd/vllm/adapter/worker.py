"""Stock's pull worker, with kvpd's decisions at its seams.

The seams, the same in vLLM 0.30 to 0.33: ``add_remote_agent`` is called before anything of a peer
is registered; ``_read_blocks`` starts one request's READ from one rank; ``_pop_done_transfers``
says what ended.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import zmq
from vllm.distributed.kv_transfer.kv_connector.utils import EngineTransferInfo
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.tp_mapping import compute_tp_mapping

from kvpd._kvpd import EngineDescription, negotiate
from kvpd.direct import DirectPart, Exporter
from kvpd.errors import DirectError, KvpdError, SideChannelError, TransferError
from kvpd.nixl import Agent, AgentName
from kvpd.request import Failed, NotHeld, Outcome
from kvpd.vllm.adapter.description import describe, stock_knows_pages
from kvpd.vllm.adapter.handshake import (
    TaggedAgentMetadata,
    attach_tag,
    forget_received,
    received_digest,
    received_engine_id,
)
from kvpd.vllm.adapter.limits import config_error
from kvpd.vllm.adapter.memory import default_slab_bytes
from kvpd.vllm.adapter.proving import ProvingWorker
from kvpd.vllm.adapter.stats import KvpdStats
from kvpd.vllm.config import ConnectorConfig
from kvpd.vllm.converters import register_converters
from kvpd.vllm.held import new_id
from kvpd.vllm.judgement import Digests, Local, paused, wrong_engine
from kvpd.vllm.leases import Leases
from kvpd.vllm.link import Link
from kvpd.vllm.lost import LostPeers
from kvpd.vllm.readers import Readers
from kvpd.wire import Handshake, encode_tag

# vLLM configures handlers for its own loggers only.
logger = logging.getLogger("vllm.kvpd")


class KvpdWorker(ProvingWorker):
    """Stock's pull worker; peers are judged first, and peers of another format are converted."""

    enforce_compat_hash: bool
    nixl_wrapper: Any

    def __init__(self, vllm_config: Any, engine_id: str, kv_cache_config: Any) -> None:
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._config = ConnectorConfig.of(extra)
        self._link: Link | None = None
        self._exporter: Exporter | None = None
        self._lost = LostPeers(time.perf_counter)
        super().__init__(vllm_config, engine_id, kv_cache_config, self._config.held_timeout_seconds)
        # Stock compares digests before it decodes anything. Deferred to `add_remote_agent`.
        self._enforces_digest = self.enforce_compat_hash
        self.enforce_compat_hash = False
        self._leases = Leases(self._lease_extension)
        # Of each request that is read: its name on the peer, and the expiry the peer published.
        self._leased: dict[str, tuple[str, float]] = {}
        self._readers = Readers()
        self.xfer_stats = KvpdStats()

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Register as stock, then describe what was registered and tag the handshake with it."""
        super().register_kv_caches(kv_caches)
        if self.use_host_buffer:
            # What peers would read are copies whose layout nobody declares.
            raise config_error("kv_buffer_device", "cpu", "the device of the cache")
        description = describe(self, kv_caches)
        takes_stock = negotiate(description, None).kind != "refuse"
        if description.format is not None:
            # Also where conversion is off: then the refusal says that turning it on would help.
            register_converters(self.attn_backends, description.format)
        self._link = Link(
            Agent(self.nixl_wrapper),
            Local(description, self._physical_blocks_per_logical_kv_block),
            list(kv_caches.values()),
            self._config,
            self.xfer_stats,
            time.perf_counter,
            max_request_pages=-(-self.model_config.max_model_len // self.block_size),
            default_slab_bytes=default_slab_bytes(
                self.vllm_config, self._config, description, next(iter(kv_caches.values())).device
            ),
        )
        self._start = new_id()
        handshake = Handshake(
            self.engine_id, description, direct=self._offer(description), start=self._start
        )
        attach_tag(
            self.xfer_handshake_metadata,
            encode_tag(handshake),
            "" if takes_stock or stock_knows_pages(self) else "pages that stock would misread",
        )

    def _offer(self, description: EngineDescription) -> DirectPart | None:
        """Offer the cache to decoders on this host, if the operator wants that and it can be."""
        if not (self._config.direct_transfer and self.kv_transfer_config.is_kv_producer):
            return None
        if self._exporter is not None:
            # Caches that are registered anew lie elsewhere.
            self._exporter.close()
        try:
            self._exporter = Exporter(description.regions)
        except DirectError as error:
            logger.warning("the cache's memory is not offered to decoders: %s", error)
            return None
        return self._exporter.part

    def _nixl_handshake(
        self,
        host: str,
        port: int,
        remote_tp_size: int,
        expected_engine_id: str,
        *more: Any,
        **options: Any,
    ) -> Any:
        """As stock, but not at once with a peer that was lost again and again.

        Raises:
            KvpdError: not yet, the peer is refused, or another engine answers at its address.
        """
        if (seconds := self._lost.pause_seconds(expected_engine_id)) > 0:
            raise paused(expected_engine_id, seconds)
        forget_received()
        try:
            return super()._nixl_handshake(
                host, port, remote_tp_size, expected_engine_id, *more, **options
            )
        except (zmq.ZMQError, SideChannelError):
            self._lost.unreachable(expected_engine_id)
            raise
        except RuntimeError as error:
            found = received_engine_id()
            if isinstance(error, KvpdError) or found in ("", expected_engine_id):
                raise
            address = f"{host}:{port}"
            with self._linked().refusing(expected_engine_id):
                raise wrong_engine(address, expected_engine_id, found, self.engine_id) from error

    def add_remote_agent(
        self,
        nixl_agent_meta: TaggedAgentMetadata,
        remote_tp_rank: int = 0,
        remote_tp_size: int = 1,
        remote_dcp_size: int = 1,
    ) -> AgentName:
        """Judge the peer, then register it with the link, or as stock where the link leaves it."""
        meta, engine_id = nixl_agent_meta, nixl_agent_meta.engine_id
        known: AgentName | None = self._remote_agents.get(engine_id, {}).get((0, remote_tp_rank))
        if known is not None:
            return known
        link = self._linked()
        digests = Digests(str(self.compat_hash), received_digest(), self._enforces_digest)
        judgement = link.judge(meta, digests)
        # Else the peer would be kept as one of so many ranks, at one request's word.
        self._check_tp_size(judgement.handshake, meta.block_lens, remote_tp_size)
        # Before anything is connected: what raises after that has to undo it.
        if judgement.handshake is not None:
            self._tagged.add(engine_id)
            self._note_owner(engine_id, remote_tp_rank, judgement.handshake.start)
        peer = link.connect(judgement, meta.agent_metadata)
        if peer is None:
            if judgement.handshake is not None:
                # Equal bytes are proved; stock would only compare the names of layouts and
                # backends, and where they differ repack what every peer sends from then on.
                meta.kv_cache_layout = self.kv_cache_layout
                meta.attn_backend_name = self.backend_name
            is_first = engine_id not in self.tp_mappings
            try:
                name: AgentName = super().add_remote_agent(
                    meta, remote_tp_rank, remote_tp_size, remote_dcp_size
                )
            except BaseException:
                # Stock checks when it has noted half of the peer; the next handshake would stumble
                # over what is left.
                if is_first:
                    self._forget_half(engine_id)
                raise
            return name
        try:
            self._note_own_peer(meta, remote_tp_rank, remote_tp_size, remote_dcp_size)
        except BaseException:
            # Else every later handshake would find the peer connected already. This may be the
            # handshake's thread, which must not release what the engine's thread polls.
            link.drop(engine_id)
            raise
        # Stock looks a handle up before every read; `_read_blocks` below never uses it.
        self.dst_xfer_side_handles[engine_id][remote_tp_rank] = 0
        return peer.agent_name

    def _forget_half(self, engine_id: str) -> None:
        """Undo what stock notes of a peer before it checks it."""
        self.transfer_topo.unregister_remote_engine(engine_id)
        for notes in (
            self.tp_mappings,
            self.dst_num_blocks,
            self.dst_region_num_blocks,
            self.dst_region_group_ids,
            self.dst_uses_region_group_mapping,
            self.dst_region_mem_types,
            self.kv_caches_base_addr,
        ):
            notes.pop(engine_id, None)

    def _note_own_peer(
        self, meta: TaggedAgentMetadata, rank: int, tp_size: int, dcp_size: int
    ) -> None:
        """The book-keeping that stock's request path reads; no descriptors."""
        engine_id = meta.engine_id
        topology = self.transfer_topo
        topology.register_remote_engine(
            engine_id,
            EngineTransferInfo(
                remote_tp_size=tp_size,
                remote_block_size=meta.block_size,
                remote_block_len=meta.block_lens[0],
                remote_physical_blocks_per_logical=meta.physical_blocks_per_logical_kv_block,
                remote_dcp_size=dcp_size,
            ),
        )
        self.tp_mappings[engine_id] = compute_tp_mapping(
            transfer_topology=topology,
            remote_tp_size=tp_size,
            group_spec_types=self._group_spec_types,
            remote_dcp_size=dcp_size,
        )
        self.dst_num_blocks[engine_id] = meta.num_blocks
        self.dst_region_group_ids[engine_id] = list(self.region_group_ids)
        self.dst_uses_region_group_mapping[engine_id] = self._uses_region_group_mapping

    def _read_blocks(
        self,
        read_spec: Any,
        dst_engine_id: str,
        request_id: str,
        remote_request_id: str,
        **rest: Any,
    ) -> bool:
        """Start a request; late and second ones fail, those of the link's peers go to the link."""
        link = self._linked()
        has_blocks = any(len(group) > 0 for group in read_spec.local_block_ids)
        published = self._published_expiry(request_id, dst_engine_id)
        deadline = self._leases.deadline(remote_request_id, published)
        if has_blocks and deadline is not None and time.perf_counter() >= deadline:
            logger.warning("%s: the lease of its remote blocks has run out", request_id)
            self._expire(request_id)
            return False
        is_reader = self._readers.begin(dst_engine_id, remote_request_id, request_id)
        if has_blocks and not is_reader:
            logger.error(
                "%s: another request reads, or has read, the blocks of %s, which the prefill may "
                "reuse then; every request needs a prefill of its own",
                request_id,
                remote_request_id,
            )
            self.xfer_stats.record_second_reader()
            self._recv_failures.add(request_id)
            return False
        if not is_reader:
            # It reads nothing. Its notice would let the prefill reuse what the other still reads.
            if rest["awaiting_kvs"]:
                self._recving_transfers.setdefault(request_id, [])
            return True
        is_only = self._readers.notifies(dst_engine_id, remote_request_id, request_id)
        inquiry = self._inquiries.get(request_id)
        if not has_blocks or not link.serves(dst_engine_id):
            if inquiry is not None:
                inquiry.takes_released = is_only
            is_posted = bool(
                super()._read_blocks(
                    read_spec=read_spec,
                    dst_engine_id=dst_engine_id,
                    request_id=request_id,
                    remote_request_id=remote_request_id,
                    **rest,
                )
            )
            if not is_posted:
                self._let_go(request_id)
        else:
            # The link's peers have one KV group, as we have, and `_prove` has paired the blocks.
            (local_ids,), (remote_ids,) = read_spec.local_block_ids, read_spec.remote_block_ids
            link.start(
                request_id,
                dst_engine_id,
                local_ids,
                remote_ids,
                notice=f"{remote_request_id}:{rest['expected_consumers']}".encode(),
                deadline=deadline,
                is_held=None
                if inquiry is None
                else partial(self._asker.is_held, request_id, inquiry),
            )
            is_posted = True
            if link.slab_use is not None:
                self.xfer_stats.record_slab_use(link.slab_use)
        if is_posted and published is not None and has_blocks:
            self._leased[request_id] = (remote_request_id, published)
        return is_posted

    def _let_go(self, req_id: str) -> None:
        """Nothing is read for this request any more; others may read what it named."""
        self._leased.pop(req_id, None)
        self._readers.end(req_id, is_released=False)
        if self._link is not None:
            self._link.abort(req_id)
        super()._let_go(req_id)

    def _pop_done_transfers(self, transfers: dict[str, list[int]]) -> tuple[set[str], set[str]]:
        """As stock, but a converted request is in flight until the link has its outcome."""
        link = self._link
        if link is None:
            stock: tuple[set[str], set[str]] = super()._pop_done_transfers(transfers)
            return stock
        outcomes: list[Outcome] = []
        with self.going_on():
            # Before this step's outcomes: stock still looks up the engine of a request that is
            # done.
            for engine_id in link.disconnected():
                # One whose handshake has not ended yet comes up again.
                if engine_id in self._remote_agents:
                    self._cleanup_remote_engine(engine_id, log_eviction=False)
            self._let_lost_peers_go()
            outcomes = link.poll()
        held = {}
        for name in list(transfers):
            is_live = True
            with self.going_on():
                is_live = link.is_live(name)
            if is_live:
                held[name] = transfers.pop(name)
        done, failed = super()._pop_done_transfers(transfers)
        transfers.update(held)
        for outcome in outcomes:
            with self._alone(outcome.request_id):
                self._take(outcome, failed)
        came = {outcome.request_id for outcome in outcomes}
        for name in list(done):
            with self._alone(name):
                # Of a failed read no notice was sent, so that it may be asked for again.
                is_released = name not in failed and name not in self._recv_failures
                if name not in came and is_released:
                    is_served = self._is_served(name)
                    if is_served is None:
                        # In flight, for everybody, until the owner has answered.
                        done.remove(name)
                        transfers[name] = []
                        continue
                    if not is_served:
                        failed.add(name)
                self._readers.end(name, is_released=is_released)
                self._forget(name)
                if is_released:
                    self._lost.was_read(self._engine_of(name))
        return done, failed

    def _is_served(self, name: str) -> bool | None:
        """Whether what a READ of stock's brought is the request's own; None: not known yet."""
        inquiry = self._inquiries.get(name)
        if inquiry is None:
            return not self._is_late(name)
        answer = self._asker.is_held(name, inquiry)
        if isinstance(answer, NotHeld):
            logger.error("%s: %s: %s", name, answer.code, answer.reason)
            self.xfer_stats.record_failed_request(answer.code)
            return False
        return None if answer is None else True

    def _forget(self, name: str) -> None:
        """Nothing is awaited for a request any more."""
        self._leased.pop(name, None)
        self._inquiries.pop(name, None)
        self._asker.forget(name)

    def _take(self, outcome: Outcome, failed: set[str]) -> None:
        """Note how a request of the link's ended."""
        if _shows_loss(outcome):
            self._lose(self._engine_of(outcome.request_id))
        if isinstance(outcome, Failed):
            logger.error("%s: %s: %s", outcome.request_id, outcome.code, outcome.reason)
            if outcome.code in ("not-held", "held-unanswered"):
                # The transfer did not fail, and the peer is as good as it was.
                self.xfer_stats.record_failed_request(outcome.code)
                failed.add(outcome.request_id)
            else:
                self._handle_failed_transfer(outcome.request_id, None, failed)
        else:
            self.xfer_stats.record_ready(outcome)
            if outcome.notice_error:
                self.xfer_stats.record_failed_notification()

    def _is_late(self, name: str) -> bool:
        """Whether a read of stock's ended after the peer could reuse its blocks; says so."""
        lease = self._leased.get(name)
        deadline = None if lease is None else self._leases.deadline(*lease)
        if deadline is None or time.perf_counter() < deadline:
            return False
        logger.warning("%s: its lease ran out before the read had ended", name)
        self.xfer_stats.record_kv_expired_req()
        return True

    def _let_lost_peers_go(self) -> None:
        """Let go of lost peers that nothing reads; not while outcomes are being handed on."""
        lost = self._lost.known()
        if not lost:
            return
        with self._handshake_lock:
            # NIXL may be loading somebody's metadata, and vLLM makes its agent without locks.
            if self._handshake_futures:
                return
        busy = {self._engine_of(name) for name in self._recving_transfers}
        for engine_id in lost:
            if engine_id not in busy:
                self._cleanup_remote_engine(engine_id, log_eviction=False)

    def _lose(self, engine_id: str) -> None:
        if engine_id in self._remote_agents:
            self._lost.note(engine_id)

    def _engine_of(self, request_id: str) -> str:
        """Whose blocks a request is to receive; "" of one that receives nothing."""
        meta = self._recving_metadata.get(request_id)
        return "" if meta is None or meta.remote is None else str(meta.remote.engine_id)

    def _handle_failed_transfer(
        self, req_id: str, handle: int | None, *more: Any, **options: Any
    ) -> bool:
        """As stock; a READ that was posted and failed has lost its peer."""
        if handle is not None:
            self._lose(self._engine_of(req_id))
        return bool(super()._handle_failed_transfer(req_id, handle, *more, **options))

    def _reach(self, req_id: str, meta: Any) -> bool:
        """As the base; nothing new is asked of a lost peer, or it would never be let go of.

        Raises:
            TransferError: something still reads it.
        """
        engine_id = meta.remote.engine_id
        if self._lost.is_known(engine_id):
            self._let_lost_peers_go()
        if self._lost.is_known(engine_id):
            raise TransferError(
                f"peer {engine_id} is lost, and something still reads it",
                code="peer-lost",
                field="remote_engine_id",
                got=engine_id,
            )
        return super()._reach(req_id, meta)

    def _read_proved(self, req_id: str, meta: Any) -> None:
        """As stock; a notice that cannot be sent loses its peer."""
        if any(meta.local_block_ids):
            super()._read_proved(req_id, meta)
            return
        with self._observed_notices():
            super()._read_proved(req_id, meta)

    @contextmanager
    def _observed_notices(self) -> Iterator[SentNotices]:
        """Stock swallows what cannot be sent. What is not sent in here loses its peer."""
        native: Any = self.nixl_wrapper
        observer = SentNotices(native)
        self.nixl_wrapper = observer
        try:
            yield observer
        finally:
            self.nixl_wrapper = native
        if observer.failed:
            # A copy: handshakes add peers on another thread.
            for engine_id, agents in list(self._remote_agents.items()):
                if observer.failed & set(agents.values()):
                    self._lose(engine_id)

    def _send_heartbeats(self, metadata: Any) -> None:
        """As stock; what was sent moves the deadlines we know."""
        if not metadata.heartbeat_by_engine:
            # Most steps: nothing is sent, so no deadline moves.
            super()._send_heartbeats(metadata)
            return
        with self._observed_notices() as observer:
            super()._send_heartbeats(metadata)
        now = time.perf_counter()
        for engine_id, info in metadata.heartbeat_by_engine.items():
            agents = set(self._remote_agents.get(engine_id, {}).values())
            # Stock skips engines that shake hands, and swallows what cannot be sent.
            if agents and agents <= observer.reached:
                self._leases.renew(info.req_ids, now)
        for request_id, lease in list(self._leased.items()):
            with self._alone(request_id):
                deadline = self._leases.deadline(*lease)
                if deadline is not None:
                    self._linked().extend(request_id, deadline)

    def _cleanup_remote_engine(self, engine_id: str, **options: Any) -> None:
        """As stock; the link disconnects its own peers."""
        link = self._link
        if link is not None and link.serves(engine_id):
            link.disconnect(engine_id)
            # The link has released the rows and removed the agent, or will once nothing reads.
            self.dst_xfer_side_handles.pop(engine_id, None)
            self._remote_agents[engine_id] = {}
        self._tagged.discard(engine_id)
        self._owners.pop(engine_id, None)
        super()._cleanup_remote_engine(engine_id, **options)
        if self._lost.is_known(engine_id):
            seconds = self._lost.let_go(engine_id)
            logger.warning(
                "peer %s: a READ or a notice did not reach it. It is let go of; the next request "
                "shakes hands again%s",
                engine_id,
                f", in {seconds:.0f} s at the earliest" if seconds else "",
            )

    def shutdown(self) -> None:
        """Stop our own reads first: stock would deregister the memory under them."""
        link = getattr(self, "_link", None)
        if link is not None:
            try:
                # A copy: handshakes may still end.
                for engine_id in [e for e in list(self._remote_agents) if link.serves(e)]:
                    self._cleanup_remote_engine(engine_id, log_eviction=False)
                link.close()
            except KvpdError as error:
                logger.error("shutdown: %s", error)
        exporter = getattr(self, "_exporter", None)
        if exporter is not None and (num_mapped := exporter.close()):
            logger.error("shutdown: %d decoders still have the cache's memory mapped", num_mapped)
        super().shutdown()

    def _log_failure(
        self,
        failure_type: str,
        req_id: str | None,
        msg: str = "",
        error: BaseException | None = None,
        meta: Any = None,
        **extra: Any,
    ) -> None:
        """As stock; why a peer is refused was said once, and is not said again per request."""
        if isinstance(error, KvpdError) and failure_type.startswith("handshake"):
            logger.debug("%s: the peer is refused: %s", req_id, error.code)
            return
        super()._log_failure(failure_type, req_id, msg, error, meta, **extra)

    def _linked(self) -> Link:
        if self._link is None:
            raise KvpdError("no caches are registered", code="not-registered", field="kv_caches")
        return self._link

    def _published_expiry(self, request_id: str, engine_id: str) -> float | None:
        """What the peer published with the request, by our clock."""
        meta = self._recving_metadata.get(request_id)
        published = None if meta is None or meta.remote is None else meta.remote.blocks_expiry_time
        if published is None:
            return None
        return float(published - self._engine_clock_offset.get(engine_id, 0.0))

    def _expire(self, request_id: str) -> None:
        # Counted as expired, not as a failure of the transport.
        self.xfer_stats.record_kv_expired_req()
        self._recv_failures.add(request_id)


def _shows_loss(outcome: Outcome) -> bool:
    """Whether a request's end says that something did not reach its peer."""
    if isinstance(outcome, Failed):
        return outcome.code == "read-failed"
    return bool(outcome.notice_error)


class SentNotices:
    """A NIXL agent that remembers whom notices reached, and whom they did not."""

    def __init__(self, native: Any) -> None:
        self._native = native
        self.reached: set[AgentName] = set()
        self.failed: set[AgentName] = set()

    def send_notif(self, agent_name: AgentName, **more: Any) -> None:
        """As the agent's."""
        is_sent = False
        try:
            self._native.send_notif(agent_name, **more)
            is_sent = True
        finally:
            (self.reached if is_sent else self.failed).add(agent_name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._native, name)
