"""What the connector decides about peers and how it drives the receiver; knows nothing of vLLM."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Protocol

import torch

from kvpd._kvpd import EngineDescription
from kvpd.convert import registered_pairs
from kvpd.errors import DirectError, KvpdError, RefusedError, TransferError
from kvpd.nixl import Agent
from kvpd.peer import Peer
from kvpd.receive import BlockIds, Receiver
from kvpd.request import HeldCheck, Outcome
from kvpd.vllm.config import ConnectorConfig
from kvpd.vllm.judgement import Digests, Judgement, Local, PeerMetadata, Policy, judge

# vLLM configures handlers for its own loggers only; a refusal must be seen.
logger = logging.getLogger("vllm.kvpd")
_NOT_ASKED = (
    "it cannot be asked whether it still holds what is read: a READ that ends after its lease, or "
    "a second decoder's of one request, is not noticed and can bring tokens of another prompt"
)
_MAX_REMEMBERED_PEERS = 1024
_MAX_MESSAGES_A_PEER = 16
_MAX_LISTED_LAYERS = 4


class Record(Protocol):
    """Where a link counts what it decided."""

    def record_refusal(self, codes: Sequence[str]) -> None:
        """A handshake was refused, for these reasons."""

    def record_untagged_peer(self) -> None:
        """A peer without a tag was accepted."""


class Link:
    """One rank's view of its peers.

    Args:
        agent: the engine's NIXL agent; the cache is registered with it.
        local: our facts and regions.
        storages: the cache's tensors.
        config: what the operator chose.
        record: counts refusals and untagged peers.
        clock: seconds; deadlines are readings of it.
        max_request_pages: blocks of the longest request.
        default_slab_bytes: size of the slab where the operator gave none.

    Raises:
        KvpdError: conversion is asked for and cannot be had (format or slab).
    """

    def __init__(
        self,
        agent: Agent,
        local: Local,
        storages: Sequence[torch.Tensor],
        config: ConnectorConfig,
        record: Record,
        clock: Callable[[], float],
        *,
        max_request_pages: int,
        default_slab_bytes: int = 0,
    ) -> None:
        description = local.description
        self._local = local
        self._config = config
        self._record = record
        self._receiver: Receiver | None = None
        self._peers: dict[str, Peer] = {}
        self._said: dict[str, set[str]] = {}
        if config.page_format_conversion:
            _check_one_format(description)
        if config.page_format_conversion or config.direct_transfer:
            slab_bytes = default_slab_bytes if config.slab_bytes is None else config.slab_bytes
            self._receiver = Receiver(
                agent,
                description,
                storages,
                convert=config.page_format_conversion,
                direct=config.direct_transfer,
                placement="planned" if slab_bytes else "in_place",
                slab_bytes=slab_bytes,
                max_pages=max_request_pages,
                link=config.link_model(description.regions[0].memory),
                require_tagged=config.require_tagged_peers,
                allow_other_weights=config.allow_other_weights,
                clock=clock,
            )

    def judge(self, peer: PeerMetadata, digests: Digests) -> Judgement:
        """Decide about a peer before anything of it is registered; say and count the outcome.

        Raises:
            KvpdError: as `kvpd.vllm.judgement.judge`.
        """
        engine_id = peer.engine_id
        policy = Policy(
            convert=self._config.page_format_conversion,
            require_tagged=self._config.require_tagged_peers,
            allow_other_weights=self._config.allow_other_weights,
            converters=registered_pairs(),
        )
        with self.refusing(engine_id):
            judgement = judge(self._local, peer, digests, policy)
        if judgement.handshake is None:
            self._record.record_untagged_peer()
        for warning in judgement.verdict.warnings:
            text = f"peer {engine_id}: {warning.code}: {warning.remedy}"
            if judgement.handshake is None:
                text += f"; {_NOT_ASKED}"
            self._say(engine_id, logging.WARNING, text)
        self._say(engine_id, logging.INFO, f"peer {engine_id}: {judgement.verdict}")
        return judgement

    def connect(self, judgement: Judgement, nixl_metadata: bytes) -> Peer | None:
        """Prepare a peer whose requests come through the receiver.

        Returns:
            None for equal pages that are not read directly: those stock serves.

        Raises:
            KvpdError: as `Receiver.add_peer`.
        """
        handshake, receiver = judgement.handshake, self._receiver
        if handshake is None or receiver is None:
            return None
        engine_id, offered = handshake.engine_id, replace(handshake, nixl_metadata=nixl_metadata)
        if judgement.verdict.kind == "convert":
            with self.refusing(engine_id):
                peer = receiver.add_peer(offered)
        elif self._config.direct_transfer and not judgement.is_whole:
            # Ids of several groups, or of blocks of several kernel blocks, name no pages here.
            text = "not direct: its blocks are not one page of every region"
            self._say(engine_id, logging.INFO, f"peer {engine_id}: {text}")
            return None
        elif self._config.direct_transfer:
            with self.refusing(engine_id):
                try:
                    peer = receiver.add_peer(offered, must_be_direct=True)
                except DirectError as error:
                    self._say(engine_id, logging.INFO, f"peer {engine_id}: not direct: {error}")
                    return None
        else:
            return None
        self._peers[engine_id] = peer
        try:
            self._say(engine_id, logging.INFO, f"peer {engine_id}: {peer.explain()}")
        except BaseException:
            # Else the receiver would know it for good, and refuse it as known already.
            self.drop(engine_id)
            raise
        return peer

    def serves(self, engine_id: str) -> bool:
        """Whether this peer's requests come through the receiver."""
        return engine_id in self._peers

    def start(
        self,
        request_id: str,
        engine_id: str,
        local_ids: BlockIds,
        remote_ids: BlockIds,
        *,
        notice: bytes,
        deadline: float | None,
        is_held: HeldCheck | None = None,
    ) -> None:
        """Begin to read a request. Raises `KvpdError` as `Receiver.start`."""
        if self._receiver is None:
            raise KvpdError("there is no receiver", code="not-served", field="engine_id")
        self._receiver.start(
            request_id,
            self._peers[engine_id],
            local_ids,
            remote_ids,
            deadline=deadline,
            notice=notice,
            is_held=is_held,
        )

    def extend(self, request_id: str, deadline: float) -> None:
        """The peer keeps a request's blocks for longer; of requests that are not ours, nothing."""
        if self._receiver is not None:
            self._receiver.extend(request_id, deadline)

    def abort(self, request_id: str) -> None:
        """End a request early, if it is live; its outcome comes once nothing writes its blocks."""
        if self._receiver is not None:
            # One that is not live, or has its outcome already, has nothing to be ended.
            with suppress(TransferError):
                self._receiver.abort(request_id)

    def poll(self) -> list[Outcome]:
        """Outcomes since the last call; a request is live until it has been among them."""
        return [] if self._receiver is None else self._receiver.poll()

    def disconnected(self) -> list[str]:
        """Engines the receiver has let go of: they withdrew their memory, or the device failed.

        Nothing of them is live. Once they are forgotten their next request shakes hands again.
        """
        receiver = self._receiver
        if receiver is None:
            return []
        # Asked at every step; only a peer that leaves is ever let go of.
        return [
            engine_id
            # A copy: handshakes add peers on another thread.
            for engine_id, peer in list(self._peers.items())
            if peer.is_leaving and not receiver.is_connected(peer)
        ]

    def is_live(self, request_id: str) -> bool:
        """Whether something may still write the request's blocks."""
        return self._receiver is not None and self._receiver.is_live(request_id)

    @property
    def num_live(self) -> int:
        """Requests that have no outcome yet."""
        return 0 if self._receiver is None else self._receiver.num_live

    @property
    def slab_use(self) -> float | None:
        """Fraction of the slab's slots that are taken; None without a slab."""
        return None if self._receiver is None else self._receiver.slab_use

    def drop(self, engine_id: str) -> None:
        """Forget a peer that has just been connected; the next `poll` lets go of it.

        For the handshake's thread, where `disconnect` must not be called.
        """
        peer = self._peers.pop(engine_id, None)
        if peer is not None:
            peer.is_leaving = True

    def disconnect(self, engine_id: str) -> None:
        """Forget a peer; its live requests fail."""
        peer = self._peers.pop(engine_id, None)
        if peer is not None and self._receiver is not None:
            self._receiver.remove_peer(peer)

    def close(self) -> None:
        """Stop everything that is live. Raises `TransferError` when a READ cannot be stopped."""
        self._peers.clear()
        if self._receiver is not None:
            self._receiver.close()

    @contextmanager
    def refusing(self, engine_id: str) -> Iterator[None]:
        """Count and say, once, why a peer is not served: the `KvpdError` that is raised inside."""
        try:
            yield
        except KvpdError as error:
            verdict = error.verdict if isinstance(error, RefusedError) else None
            codes = [error.code] if verdict is None else [r.code for r in verdict.reasons]
            self._record.record_refusal(codes)
            text = f"{error.code}: {error}" if verdict is None else str(error)
            self._say(engine_id, logging.ERROR, f"peer {engine_id} is refused: {text}")
            raise

    def _say(self, engine_id: str, level: int, text: str) -> None:
        # Every request to a refused peer shakes hands again; the reasons are worth one message.
        if len(self._said) >= _MAX_REMEMBERED_PEERS and engine_id not in self._said:
            self._said.clear()
        said = self._said.setdefault(engine_id, set())
        if text not in said and len(said) < _MAX_MESSAGES_A_PEER:
            said.add(text)
            logger.log(level, "%s", text)


def _check_one_format(description: EngineDescription) -> None:
    """Raise `KvpdError` unless every page of this rank could be converted into."""
    num_groups = description.facts.num_kv_groups
    if num_groups == 1 and description.format is not None:
        return
    layers: dict[str, dict[str, None]] = {}
    for region in description.regions:
        name = "untagged" if region.format is None else region.format.name
        layers.setdefault(name, {}).update(dict.fromkeys(region.layers))
    kept = "; ".join(f"{_shortened(list(names))} keep {name}" for name, names in layers.items())
    if num_groups > 1:
        remedy = (
            "Start both sides with --disable-hybrid-kv-cache-manager, which gives models of full "
            "and sliding-window layers one group; or switch page_format_conversion off, and use "
            "one page format on both sides"
        )
    else:
        remedy = "Use one attention backend for all layers, or switch page_format_conversion off"
    raise KvpdError(
        "page_format_conversion needs one KV cache group and one page format in all layers; here "
        f"are {num_groups} KV cache groups: {kept}. {remedy}",
        code="mixed-local-formats",
        field="kv_connector_extra_config.page_format_conversion",
        got=f"{num_groups} KV cache groups, {len(layers)} formats",
        expected="1 KV cache group, 1 format",
    )


def _shortened(names: list[str]) -> str:
    more = len(names) - _MAX_LISTED_LAYERS
    listed = ", ".join(names[:_MAX_LISTED_LAYERS])
    return f"layers {listed} and {more} more" if more > 0 else f"layers {listed}"
