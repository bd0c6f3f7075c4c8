"""Which local block takes which block of a peer: by position in the sequence, never by count.

A list of blocks is where it is said to be: the peer's ends with the block of its last computed
token, ours begins with the first block that is not computed. Counted from an end instead, one
token more or less on a side gives every block another one's content.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from kvpd.errors import RequestError

# vLLM keeps block 0 for positions that hold nothing, in front of a window.
NULL_BLOCK = 0


@dataclass(frozen=True)
class Group:
    """One KV group: layers that share block tables.

    Attributes:
        block_tokens: tokens of a block.
        is_window: the peer lists only its last blocks. Of other groups it lists all.
        is_ahead: the peer may list blocks after that of its last computed token.
    """

    block_tokens: int
    is_window: bool = False
    is_ahead: bool = False


@dataclass(frozen=True)
class Wanted:
    """What a request waits for.

    Attributes:
        local_block_ids: for each KV group, blocks of ours without gaps. The engine attends to them,
            or gives them to later requests with the same prefix.
        first_blocks: for each group, the position of the first of them.
        num_tokens: leading tokens of the sequence that are taken as computed once they are read.
    """

    local_block_ids: tuple[tuple[int, ...], ...]
    first_blocks: tuple[int, ...]
    num_tokens: int


def check_ids(remote_ids: Sequence[Sequence[int]], num_remote_blocks: Sequence[int]) -> None:
    """Prove that ids name blocks of the peer, none of them twice.

    Args:
        remote_ids: for each of the peer's KV groups.
        num_remote_blocks: for each group, how many blocks the peer has.

    Raises:
        RequestError: code "remote-blocks".
    """
    if len(remote_ids) != len(num_remote_blocks):
        raise _error(f"{len(remote_ids)} groups", f"{len(num_remote_blocks)} groups")
    for ids, count in zip(remote_ids, num_remote_blocks, strict=True):
        if ids and max(ids) >= count:
            raise _error(f"block {max(ids)}", f"blocks below {count}")
        named = [block for block in ids if block != NULL_BLOCK]
        if len(set(named)) != len(named):
            (repeated, _), *_ = Counter(named).most_common(1)
            raise _error(f"block {repeated} more than once", "every block once")


def pair(
    group: Group,
    local_ids: Sequence[int],
    first_local: int,
    remote_ids: Sequence[int],
    *,
    num_tokens: int,
    num_remote_tokens: int,
) -> tuple[list[int], list[int]]:
    """The blocks of one group that are read, local and remote, in the same order.

    Args:
        group: how the peer lists its blocks.
        local_ids: blocks of ours that wait, without gaps.
        first_local: position of the first of them.
        remote_ids: the peer's.
        num_tokens: leading tokens that are taken as computed once they are read.
        num_remote_tokens: leading tokens that the peer computed.

    Returns:
        All of ours that hold any of the `num_tokens`, and their sources.

    Raises:
        RequestError: one of them has no source, or the peer's list does not fit its tokens.
    """
    num_remote = num_blocks(num_remote_tokens, group)
    if group.is_ahead:
        remote_ids = remote_ids[:num_remote]
    first_remote = num_remote - len(remote_ids)
    if first_remote < 0 or (first_remote and not group.is_window):
        raise _error(
            f"{len(remote_ids)} blocks",
            f"{num_remote} for the {num_remote_tokens} tokens that the peer computed",
        )
    end = min(first_local + len(local_ids), num_blocks(num_tokens, group))
    if end <= first_local:
        return [], []
    if first_local < first_remote or num_remote < end:
        raise _error(
            f"blocks {first_remote} to {num_remote - 1} of the sequence",
            f"blocks {first_local} to {end - 1}, which this request waits for",
        )
    remote = list(remote_ids[first_local - first_remote : end - first_remote])
    if NULL_BLOCK in remote:
        raise _error(f"block {NULL_BLOCK}", "blocks that hold tokens")
    return list(local_ids[: end - first_local]), remote


def num_blocks(num_tokens: int, group: Group) -> int:
    """Blocks that hold so many leading tokens."""
    return -(-num_tokens // group.block_tokens)


def _error(got: str, expected: str) -> RequestError:
    return RequestError(
        f"kv_transfer_params.remote_block_ids: {got}; expected {expected}; give every request the "
        "kv_transfer_params of its own prefill, as they came",
        code="remote-blocks",
        field="kv_transfer_params.remote_block_ids",
        got=got,
        expected=expected,
    )
