"""Blocks are paired by position; needs no vLLM. The oracle is a table of positions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpd import RequestError
from kvpd.vllm.pairing import Group, check_ids, pair

FULL = Group(16)


def test_an_appended_token_and_a_prefix_hit() -> None:
    """Prefilled 48 tokens; the decoder has two blocks, and a token that the router appended."""
    assert pair(FULL, [70], 2, [5, 6, 7], num_tokens=48, num_remote_tokens=48) == ([70], [7])
    # A block that nobody filled is not read.
    assert pair(FULL, [70, 71], 2, [5, 6, 7], num_tokens=48, num_remote_tokens=48) == ([70], [7])


def test_a_list_that_does_not_fit_its_tokens_is_refused() -> None:
    for remote in ([], [5, 6], [5, 6, 7, 8]):
        with pytest.raises(RequestError) as caught:
            pair(FULL, [70, 71, 72], 0, remote, num_tokens=48, num_remote_tokens=48)
        assert caught.value.code == "remote-blocks"
        assert caught.value.got == f"{len(remote)} blocks"
        assert caught.value.expected.startswith("3 for the 48 tokens")


def test_a_wanted_block_without_a_source_is_refused() -> None:
    with pytest.raises(RequestError, match="blocks 0 to 3"):
        pair(FULL, [70, 71, 72, 73], 0, [5, 6, 7], num_tokens=49, num_remote_tokens=48)


@st.composite
def sequences(draw: st.DrawFn) -> tuple[Group, int, int, int]:
    """A group, tokens that the peer has, tokens that are wanted of it, blocks that are here."""
    block = draw(st.sampled_from([1, 2, 16]))
    window = draw(st.none() | st.integers(1, 5 * block))
    remote = draw(st.integers(1, 12 * block))
    wanted = draw(st.integers(1, remote))
    return Group(block, window), remote, wanted, draw(st.integers(0, (wanted - 1) // block))


@given(sequences(), st.integers(0, 3))
def test_every_wanted_position_takes_its_own(
    drawn: tuple[Group, int, int, int], num_ahead: int
) -> None:
    group, num_remote, num_wanted, num_here = drawn
    block, window = group.block_tokens, group.window_tokens
    # Position -> id. What a window has left behind is not listed, one block to spare.
    remote = {n: 100 + n for n in range((num_remote + block - 1) // block)}
    local = {n: 500 + n for n in range(num_here, (num_wanted + block - 1) // block + num_ahead)}
    if window is not None:
        kept = (window + block - 1) // block + 1
        remote = dict(list(remote.items())[-kept:])
        local = dict(list(local.items())[-kept:])
    attended = {
        token // block
        for token in range(num_wanted)
        if window is None or token > num_wanted - window
    }
    needed = {n for n in attended if n >= min(local)}
    arguments = (group, list(local.values()), min(local), list(remote.values()))
    if not needed <= remote.keys() & local.keys():
        with pytest.raises(RequestError):
            pair(*arguments, num_tokens=num_wanted, num_remote_tokens=num_remote)
        return
    ours, theirs = pair(*arguments, num_tokens=num_wanted, num_remote_tokens=num_remote)
    both = sorted(remote.keys() & local.keys())
    assert ours == [local[n] for n in both]
    assert theirs == [remote[n] for n in both]


def test_the_peers_null_block_holds_no_tokens() -> None:
    """In front of a window vLLM lists it; where tokens are needed it is nobody's page."""
    window = Group(16, 32)
    both = pair(window, [70, 71, 72], 0, [0, 6, 7], num_tokens=48, num_remote_tokens=48)
    assert both == ([70, 71, 72], [0, 6, 7])
    with pytest.raises(RequestError, match="blocks that hold tokens"):
        pair(FULL, [70, 71, 72], 0, [0, 6, 7], num_tokens=48, num_remote_tokens=48)


@pytest.mark.parametrize(
    ("ids", "counts", "got"),
    [
        ([[1, 2, 8]], [8], "block 8"),
        ([[1, 2, 1]], [8], "block 1 more than once"),
        ([[1], [2]], [8], "2 groups"),
        ([], [8], "0 groups"),
        ([[3, 3], [1]], [8, 8], "block 3 more than once"),
    ],
)
def test_ids_name_blocks_of_the_peer_once(
    ids: list[list[int]], counts: list[int], got: str
) -> None:
    with pytest.raises(RequestError) as caught:
        check_ids(ids, counts)
    assert (caught.value.code, caught.value.got) == ("remote-blocks", got)


def test_the_null_block_may_be_listed_again() -> None:
    check_ids([[0, 0, 5], [5]], [6, 6])
