"""The handshake seam: stock's metadata with our tag, and the digest that stock would compare away.

Stock looks ``NixlAgentMetadata`` and ``NixlHandshakePayload`` up as globals of its worker module
when it decodes a peer's bytes. Subclasses put there at import carry the tag, which stock decoders
skip.
"""

from __future__ import annotations

import hashlib
import threading
from dataclasses import dataclass

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
    NixlAgentMetadata,
    NixlHandshakePayload,
)

from kvpd.wire import decode_tag


class _Received(threading.local):
    digest: str = ""
    engine_id: str = ""


_received = _Received()


@dataclass
class TaggedAgentMetadata(NixlAgentMetadata):
    """Stock's metadata and our tag; whose it is, is remembered for the decoding thread."""

    kvpd: bytes | None = None

    def __post_init__(self) -> None:
        _received.engine_id = self.engine_id


@dataclass
class ObservedHandshakePayload(NixlHandshakePayload):
    """Stock's payload; the digest that came with it is remembered for the decoding thread."""

    def __post_init__(self) -> None:
        _received.digest = self.compatibility_hash


base_worker.NixlAgentMetadata = TaggedAgentMetadata
base_worker.NixlHandshakePayload = ObservedHandshakePayload


def forget_received() -> None:
    """A handshake begins on this thread: nothing has been decoded."""
    _received.digest = _received.engine_id = ""


def received_engine_id() -> str:
    """The engine that this thread decoded metadata of last; "" if it decoded none."""
    return _received.engine_id


def received_digest() -> str:
    """The digest of the payload that this thread decoded last; "" if it decoded none.

    Stock decodes a payload and registers its peer on one thread, one after the other.
    """
    return _received.digest


def attach_tag(payload: NixlHandshakePayload, tag: bytes, refused_by_stock: str) -> None:
    """Put our tag into what a peer will be sent.

    Args:
        payload: this rank's payload, as stock encoded it.
        tag: from `kvpd.wire.encode_tag`.
        refused_by_stock: if not empty, a name of pages that a stock decoder would misread: it is
            mixed into the digest, so that stock refuses us.
    """
    metadata = msgspec.msgpack.decode(payload.agent_metadata_bytes, type=TaggedAgentMetadata)
    metadata.kvpd = tag
    payload.agent_metadata_bytes = msgspec.msgpack.encode(metadata)
    if refused_by_stock:
        foreign = f"{payload.compatibility_hash} {refused_by_stock}"
        payload.compatibility_hash = hashlib.sha256(foreign.encode()).hexdigest()


def start_of(payload: NixlHandshakePayload) -> bytes | None:
    """The start id in this engine's own payload; None where it carries no tag."""
    metadata = msgspec.msgpack.decode(payload.agent_metadata_bytes, type=TaggedAgentMetadata)
    return None if metadata.kvpd is None else decode_tag(metadata.kvpd).start
