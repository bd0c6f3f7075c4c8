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

from kvpd._kvpd import EngineDescription
from kvpd.errors import WireError


@dataclass
class TaggedAgentMetadata(NixlAgentMetadata):
    """Stock's metadata and our tag."""

    kvpd: bytes | None = None


class _Received(threading.local):
    digest: str = ""


_received = _Received()


@dataclass
class ObservedHandshakePayload(NixlHandshakePayload):
    """Stock's payload; the digest that came with it is remembered for the decoding thread."""

    def __post_init__(self) -> None:
        _received.digest = self.compatibility_hash


base_worker.NixlAgentMetadata = TaggedAgentMetadata
base_worker.NixlHandshakePayload = ObservedHandshakePayload


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


def check_metadata(metadata: TaggedAgentMetadata, description: EngineDescription) -> None:
    """Raise `WireError` unless a peer's tag and its own metadata name the same memory.

    The verdict rests on the tag, stock's path on the metadata.
    """
    regions = description.regions
    num_blocks = metadata.region_num_blocks or [metadata.num_blocks] * len(regions)
    for field, got, expected in (
        ("kv_caches_base_addr", metadata.kv_caches_base_addr, [r.address for r in regions]),
        ("block_lens", metadata.block_lens, [r.block_bytes for r in regions]),
        ("block_strides", metadata.block_strides, [r.block_stride_bytes for r in regions]),
        ("region_num_blocks", num_blocks, [r.num_blocks for r in regions]),
        ("block_size", metadata.block_size, description.facts.block_size),
    ):
        if got != expected:
            raise WireError(
                f"{field}: the peer's tag and its metadata name different memory",
                code="tag-contradicts-metadata",
                field=field,
                got=got,
                expected=expected,
            )
