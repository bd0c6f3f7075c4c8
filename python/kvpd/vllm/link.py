"""What the connector decides about peers and how it drives the receiver; knows nothing of vLLM."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from kvpd._kvpd import EngineDescription, Verdict, negotiate, slab_bytes
from kvpd.errors import KvpdError, RefusedError
from kvpd.nixl import Agent
from kvpd.peer import Peer
from kvpd.receive import BlockIds, Receiver
from kvpd.request import Outcome
from kvpd.vllm.config import ConnectorConfig
from kvpd.wire import Handshake, decode_tag

# vLLM configures handlers for its own loggers only; a refusal must be seen.
logger = logging.getLogger("vllm.kvpd")
_MAX_REMEMBERED_PEERS = 1024
_MAX_MESSAGES_A_PEER = 16


class Record(Protocol):
    """Where a link counts what it decided."""

    def record_refusal(self, codes: Sequence[str]) -> None:
        """A handshake was refused, for these reasons."""

    def record_untagged_peer(self) -> None:
        """A peer without a tag was accepted."""


@dataclass(frozen=True)
class Digests:
    """Stock's compatibility digests, and whether the operator lets stock compare them.

    Attributes:
        local: ours, as a stock connector on this engine would publish it.
        remote: the peer's.
        enforced: False with ``enforce_handshake_compat=false``.
    """

    local: str
    remote: str
    enforced: bool


class Link:
    """One rank's view of its peers.

    Args:
        agent: the engine's NIXL agent; the cache is registered with it.
        description: our facts and regions.
        storages: the cache's tensors.
        config: what the operator chose.
        record: counts refusals and untagged peers.
        clock: seconds; deadlines are readings of it.
        max_request_pages: blocks of the longest request; a slab has to hold them.

    Raises:
        KvpdError: conversion is asked for and cannot be had (format or slab).
    """

    def __init__(
        self,
        agent: Agent,
        description: EngineDescription,
        storages: Sequence[torch.Tensor],
        config: ConnectorConfig,
        record: Record,
        clock: Callable[[], float],
        *,
        max_request_pages: int,
    ) -> None:
        self.description = description
        self.slab_pages = _slab_pages(description, config, max_request_pages)
        self._config = config
        self._record = record
        self._receiver: Receiver | None = None
        self._peers: dict[str, Peer] = {}
        self._requests: dict[str, int] = {}
        self._said: dict[str, set[str]] = {}
        if config.page_format_conversion:
            if description.format is None:
                raise KvpdError(
                    "page_format_conversion needs one page format in all layers",
                    code="mixed-local-formats",
                    field="kv_connector_extra_config.page_format_conversion",
                    got="several or untagged",
                    expected="one format",
                )
            self._receiver = Receiver(
                agent,
                description,
                storages,
                convert=True,
                placement="staged" if self.slab_pages else "in_place",
                slab_pages=self.slab_pages,
                require_tagged=config.require_tagged_peers,
                clock=clock,
            )

    def judge(self, engine_id: str, tag: bytes | None, digests: Digests) -> Judgement:
        """Decide about a peer before anything of it is registered.

        A tagged peer is judged by its published facts and formats. An untagged one can only be
        taken as stock takes it: by the exact digest.

        Raises:
            RefusedError: the verdict, with every reason.
            WireError: the tag is not one.
            KvpdError: an untagged peer's digest differs.
        """
        with self.refusing(engine_id):
            handshake = None if tag is None else decode_tag(tag)
            _check_engine(engine_id, handshake)
            verdict = negotiate(
                self.description,
                None if handshake is None else handshake.description,
                convert=self._config.page_format_conversion,
                require_tagged=self._config.require_tagged_peers,
            )
            if verdict.kind == "refuse":
                raise RefusedError(verdict)
            if handshake is None:
                _check_digest(digests)
        if handshake is None:
            self._record.record_untagged_peer()
        for warning in verdict.warnings:
            self._say(
                engine_id,
                logging.WARNING,
                f"peer {engine_id}: {warning.code}: {warning.remedy}",
            )
        self._say(engine_id, logging.INFO, f"peer {engine_id}: {verdict}")
        return Judgement(verdict, handshake)

    def connect(self, judgement: Judgement, nixl_metadata: bytes) -> Peer:
        """Prepare a peer whose pages are converted.

        Raises:
            KvpdError: as `Receiver.add_peer`.
        """
        handshake = judgement.handshake
        if handshake is None or self._receiver is None:
            raise KvpdError("only a tagged peer is converted", code="not-convertible", field="tag")
        with self.refusing(handshake.engine_id):
            peer = self._receiver.add_peer(replace(handshake, nixl_metadata=nixl_metadata))
        self._peers[handshake.engine_id] = peer
        return peer

    def converts(self, engine_id: str) -> bool:
        """Whether this peer's pages come through the receiver."""
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
    ) -> None:
        """Begin to read a request. Raises `KvpdError` as `Receiver.start`."""
        if self._receiver is None:
            raise KvpdError("conversion is off", code="not-convertible", field="engine_id")
        self._receiver.start(
            request_id,
            self._peers[engine_id],
            local_ids,
            remote_ids,
            deadline=deadline,
            notice=notice,
        )
        self._requests[request_id] = len(local_ids)

    def poll(self) -> list[Outcome]:
        """Outcomes since the last call; a request is live until it has been among them."""
        outcomes = [] if self._receiver is None else self._receiver.poll()
        for outcome in outcomes:
            self._requests.pop(outcome.request_id, None)
        return outcomes

    def is_live(self, request_id: str) -> bool:
        """Whether something may still write the request's blocks."""
        return request_id in self._requests

    @property
    def num_live_pages(self) -> int:
        """Pages of all live requests."""
        return sum(self._requests.values())

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


@dataclass(frozen=True)
class Judgement:
    """An accepted peer: the verdict and what it published (None if untagged)."""

    verdict: Verdict
    handshake: Handshake | None


def _check_engine(engine_id: str, handshake: Handshake | None) -> None:
    if handshake is not None and handshake.engine_id != engine_id:
        raise KvpdError(
            f"the tag of {engine_id} names engine {handshake.engine_id}",
            code="engine-id",
            field="engine_id",
            got=handshake.engine_id,
            expected=engine_id,
        )


def _check_digest(digests: Digests) -> None:
    if digests.enforced and digests.local != digests.remote:
        raise KvpdError(
            "an untagged peer is accepted only with the same configuration: stock's digest is "
            f"{digests.local} here and {digests.remote} there. It covers the vLLM version, the "
            "model, dtypes, KV heads, layers and the attention backend's name; load kvpd's "
            "connector on the peer to have the factor named",
            code="stock-digest",
            field="compatibility_hash",
            got=digests.remote,
            expected=digests.local,
        )


def _slab_pages(
    description: EngineDescription, config: ConnectorConfig, max_request_pages: int
) -> int:
    """Pages of all layers that the slab holds; 0 without one."""
    if not config.slab_bytes or not config.page_format_conversion:
        return 0
    page = slab_bytes(description.regions, num_pages=1)
    pages = config.slab_bytes // page
    if pages < max_request_pages:
        needed = max_request_pages * page
        raise KvpdError(
            f"slab_bytes {config.slab_bytes} holds {pages} blocks of {page} bytes, the longest "
            f"request has {max_request_pages}; give it {needed}, or lower max_model_len",
            code="slab-too-small",
            field="kv_connector_extra_config.slab_bytes",
            got=config.slab_bytes,
            expected=f"at least {needed}",
        )
    return pages
