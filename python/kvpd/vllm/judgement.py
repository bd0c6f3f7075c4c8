"""What is decided about a peer from the two handshakes alone; knows nothing of vLLM's code.

The connector and ``kvpd check`` decide by this one function.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvpd._kvpd import EngineDescription, PageFormat, Verdict, negotiate
from kvpd.errors import KvpdError, RefusedError, WireError
from kvpd.wire import Handshake, decode_tag


class PeerMetadata(Protocol):
    """The fields of stock's metadata that are read here, and our tag in it."""

    engine_id: str
    kv_caches_base_addr: list[int]
    num_blocks: int
    block_lens: list[int]
    block_strides: list[int]
    block_size: int
    physical_blocks_per_logical_kv_block: int
    region_num_blocks: list[int] | None
    kvpd: bytes | None


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
    enforced: bool = True


@dataclass(frozen=True)
class Policy:
    """What the operator of the reading side allows.

    Attributes:
        convert: accept peers of another page format, where the pair is in scope.
        require_tagged: refuse peers that publish no page format.
        allow_other_weights: accept peers whose weights differ or are quantised otherwise.
        converters: pairs (remote, local) that a backend converts itself.
    """

    convert: bool = False
    require_tagged: bool = False
    allow_other_weights: bool = False
    converters: Sequence[tuple[PageFormat, PageFormat]] = ()


@dataclass(frozen=True)
class Local:
    """The reading side.

    Attributes:
        description: its facts and regions.
        kernel_blocks_per_block: stock's ``physical_blocks_per_logical_kv_block``.
    """

    description: EngineDescription
    kernel_blocks_per_block: int = 1


@dataclass(frozen=True)
class Judgement:
    """An accepted peer.

    Attributes:
        verdict: identical or convert.
        handshake: what it published; None if untagged.
        is_whole: on both sides a block is one page of every region: one KV group, and one kernel
            block a block. Only then do a request's block ids name pages.
    """

    verdict: Verdict
    handshake: Handshake | None
    is_whole: bool


def judge(local: Local, peer: PeerMetadata, digests: Digests, policy: Policy) -> Judgement:
    """Decide about a peer before anything of it is registered.

    A tagged peer is judged by its published facts and formats. An untagged one can only be taken
    as stock takes it: by the exact digest.

    Raises:
        RefusedError: the verdict, with every reason.
        WireError: the tag is not one, or contradicts the peer's own metadata.
        KvpdError: an untagged peer's digest differs, blocks are not equally many kernel blocks, or
            those of a pair that is to be converted are not whole pages.
    """
    handshake = None if peer.kvpd is None else decode_tag(peer.kvpd)
    if handshake is not None and handshake.engine_id != peer.engine_id:
        raise KvpdError(
            f"the tag of {peer.engine_id} names engine {handshake.engine_id}",
            code="engine-id",
            field="engine_id",
            got=handshake.engine_id,
            expected=peer.engine_id,
        )
    verdict = negotiate(
        local.description,
        None if handshake is None else handshake.description,
        convert=policy.convert,
        require_tagged=policy.require_tagged,
        allow_other_weights=policy.allow_other_weights,
        converters=policy.converters,
    )
    if verdict.kind == "refuse":
        raise RefusedError(verdict)
    kernel_blocks = local.kernel_blocks_per_block, peer.physical_blocks_per_logical_kv_block
    if kernel_blocks[0] != kernel_blocks[1]:
        # Stock pairs kernel blocks from a request's end, which the sides pad to different lengths:
        # each page would be taken for another.
        raise _blocks_error(kernel_blocks, "start both sides with one block size", "equally many")
    if handshake is None:
        _check_digest(digests)
        return Judgement(verdict, None, is_whole=False)
    remote = handshake.description
    _check_metadata(peer, remote)
    if verdict.kind == "convert" and kernel_blocks != (1, 1):
        raise _blocks_error(kernel_blocks, "conversion needs whole ones", "1 on both sides")
    groups = local.description.facts.num_kv_groups, remote.facts.num_kv_groups
    return Judgement(verdict, handshake, is_whole=(*kernel_blocks, *groups) == (1, 1, 1, 1))


def _blocks_error(kernel_blocks: tuple[int, int], remedy: str, expected: str) -> KvpdError:
    here, there = kernel_blocks
    # Equal numbers are said once: what is wrong then is the number itself.
    got = f"{here} on both sides" if here == there else f"{here} here, {there} there"
    return KvpdError(
        f"a block is so many of the attention kernels': {got}; {remedy}",
        code="blocks-not-whole",
        field="physical_blocks_per_logical_kv_block",
        got=got,
        expected=expected,
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


def _check_metadata(peer: PeerMetadata, description: EngineDescription) -> None:
    """Raise `WireError` unless a peer's tag and its own metadata name the same memory.

    The verdict rests on the tag, stock's path on the metadata.
    """
    regions = description.regions
    counts = peer.region_num_blocks or [peer.num_blocks] * len(regions)
    for field, got, expected in (
        ("kv_caches_base_addr", peer.kv_caches_base_addr, [r.address for r in regions]),
        ("block_lens", peer.block_lens, [r.block_bytes for r in regions]),
        ("block_strides", peer.block_strides, [r.block_stride_bytes for r in regions]),
        ("region_num_blocks", counts, [r.num_blocks for r in regions]),
        ("block_size", peer.block_size, description.facts.block_size),
    ):
        if got != expected:
            raise WireError(
                f"{field}: the peer's tag and its metadata name different memory",
                code="tag-contradicts-metadata",
                field=field,
                got=got,
                expected=expected,
            )
