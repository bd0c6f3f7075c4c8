"""What one rank of a vLLM engine publishes over the side channel, read without vLLM.

Stock's two phases: a payload with the compatibility digest, and inside it the metadata, which may
carry our tag. NIXL's own part of the metadata holds keys to registered memory; it is skipped here
and exists in no object of this module.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, TypeVar

import msgspec

from kvpd.errors import WireError
from kvpd.vllm.sidechannel import MAX_REPLY_BYTES
from kvpd.wire import MAX_BYTES, MAX_REGIONS, Handshake, decode_tag

_Text = Annotated[str, msgspec.Meta(max_length=512)]
_Natural = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Small = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
_Positive = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
_PerRegion = msgspec.Meta(max_length=MAX_REGIONS)
# Addresses may use the top bit.
_Addresses = Annotated[list[Annotated[int, msgspec.Meta(ge=0)]], _PerRegion]


class StockMetadata(msgspec.Struct, kw_only=True):
    """Stock's metadata as of vLLM 0.30 to 0.33, as far as it says where pages lie.

    Lists have one entry per registered region. Sizes are bytes, block sizes tokens.
    """

    engine_id: _Text
    kv_caches_base_addr: _Addresses
    device_id: int
    num_blocks: _Small
    block_lens: Annotated[list[_Natural], _PerRegion]
    block_strides: Annotated[list[_Natural], _PerRegion]
    kv_cache_layout: _Text
    block_size: _Positive
    attn_backend_name: _Text
    physical_blocks_per_logical_kv_block: _Positive
    region_num_blocks: Annotated[list[_Small], _PerRegion] | None = None
    region_group_ids: Annotated[list[int], _PerRegion] | None = None
    region_names: Annotated[list[_Text], _PerRegion] | None = None
    region_mem_types: Annotated[list[_Text], _PerRegion] | None = None
    dcp_size: _Positive = 1
    pcp_size: _Positive = 1

    def __post_init__(self) -> None:
        regions = len(self.kv_caches_base_addr)
        for field in (
            "block_lens",
            "block_strides",
            "region_num_blocks",
            "region_group_ids",
            "region_names",
            "region_mem_types",
        ):
            values = getattr(self, field)
            if values is not None and len(values) != regions:
                raise ValueError(f"{field} has {len(values)} entries for {regions} regions")


class AgentMetadata(StockMetadata, kw_only=True):
    """Stock's metadata and our tag, None where the engine publishes none."""

    kvpd: bytes | None = None


class _Payload(msgspec.Struct, frozen=True):
    compatibility_hash: _Text
    agent_metadata_bytes: bytes


@dataclass(frozen=True)
class Published:
    """One rank's handshake.

    Attributes:
        digest: the compatibility digest that came with it.
        metadata: where its regions lie, and its tag.
    """

    digest: str
    metadata: AgentMetadata

    def handshake(self) -> Handshake | None:
        """What the tag says; None for an untagged engine.

        Raises:
            WireError: the tag is none that this release reads.
        """
        tag = self.metadata.kvpd
        return None if tag is None else decode_tag(tag)


def decode_payload(payload: bytes) -> Published:
    """Read what a side channel answered. The tag is not read yet: it may be of another version.

    Raises:
        WireError: it is too large, or nothing that vLLM 0.30 to 0.33 publishes.
    """
    if len(payload) > MAX_REPLY_BYTES:
        raise _error("oversized", "handshake", f"{len(payload)} bytes, {MAX_REPLY_BYTES} at most")
    outer = _decode(_Payload, payload, "handshake")
    metadata = _decode(AgentMetadata, outer.agent_metadata_bytes, "metadata")
    if metadata.kvpd is not None and len(metadata.kvpd) > MAX_BYTES:
        raise _error("oversized", "kvpd", f"{len(metadata.kvpd)} bytes, {MAX_BYTES} at most")
    return Published(outer.compatibility_hash, metadata)


_T = TypeVar("_T")


def _decode(kind: type[_T], blob: bytes, field: str) -> _T:
    try:
        return msgspec.msgpack.decode(blob, type=kind)
    except msgspec.ValidationError as error:
        raise _error("invalid-field", field, f"not as vLLM publishes it: {error}") from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise _error("malformed", field, f"no MessagePack of vLLM's: {error}") from error


def _error(code: str, field: str, why: str) -> WireError:
    return WireError(
        f"{field}: {why}", code=code, field=field, got=why, expected="a handshake of vLLM's"
    )
