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
        window_tokens: how far back a token attends; None for all of the sequence.
    """

    block_tokens: int
    window_tokens: int | None = None


@dataclass(frozen=True)
class Wanted:
    """What a request waits for.

    Attributes:
        local_block_ids: for each KV group, blocks of ours without gaps, up to the last one.
        first_blocks: for each group, the position of the first of them; empty where positions say
            nothing, of running states.
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
        group: how blocks and tokens relate.
        local_ids: blocks of ours that wait, without gaps.
        first_local: position of the first of them.
        remote_ids: the peer's, which end with the block of its last computed token.
        num_tokens: leading tokens that are taken as computed once they are read.
        num_remote_tokens: leading tokens that the peer computed.

    Returns:
        Without blocks that only one side has; those are not among the `num_tokens`.

    Raises:
        RequestError: a wanted block has no source, or the peer's list does not fit its tokens.
    """
    num_remote = -(-num_remote_tokens // group.block_tokens)
    first_remote = num_remote - len(remote_ids)
    if first_remote < 0 or (group.window_tokens is None and first_remote):
        raise _error(
            f"{len(remote_ids)} blocks",
            f"{num_remote} for the {num_remote_tokens} tokens that the peer computed",
        )
    start = max(first_local, first_remote)
    end = min(first_local + len(local_ids), num_remote)
    local = list(local_ids[start - first_local : max(end, start) - first_local])
    remote = list(remote_ids[start - first_remote : max(end, start) - first_remote])
    first_needed, end_needed = _needed(group, num_tokens)
    first_needed = max(first_needed, first_local)
    if first_needed < end_needed:
        if start > first_needed or end < end_needed:
            raise _error(
                f"blocks {start} to {end - 1} of the sequence",
                f"blocks {first_needed} to {end_needed - 1}, which this request waits for",
            )
        if NULL_BLOCK in remote[first_needed - start : end_needed - start]:
            raise _error(f"block {NULL_BLOCK}", "blocks that hold tokens")
    return local, remote


def _needed(group: Group, num_tokens: int) -> tuple[int, int]:
    """Blocks that the token after the first `num_tokens` attends to, as a half-open interval."""
    end = -(-num_tokens // group.block_tokens)
    first_token = 0
    if group.window_tokens is not None:
        first_token = max(0, num_tokens - group.window_tokens + 1)
    # A window of one token attends to none that was computed before.
    return (first_token // group.block_tokens, end) if first_token < num_tokens else (end, end)


def _error(got: str, expected: str) -> RequestError:
    return RequestError(
        f"kv_transfer_params.remote_block_ids: {got}; expected {expected}; give every request the "
        "kv_transfer_params of its own prefill, as they came",
        code="remote-blocks",
        field="kv_transfer_params.remote_block_ids",
        got=got,
        expected=expected,
    )
