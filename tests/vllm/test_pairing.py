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
def sequences(draw: st.DrawFn) -> tuple[int, int | None, int, int]:
    """Tokens of a block, a window, tokens that the peer has, tokens that are wanted of it."""
    block = draw(st.sampled_from([1, 2, 16]))
    window = draw(st.none() | st.integers(1, 5 * block))
    remote = draw(st.integers(1, 12 * block))
    return block, window, remote, draw(st.integers(1, remote))


def attended(num_tokens: int, window: int | None) -> set[int]:
    """Tokens that the one after the first `num_tokens` attends to."""
    return {n for n in range(num_tokens) if window is None or n > num_tokens - window}


@given(sequences(), st.integers(0, 3), st.integers(0, 12), st.integers(0, 3))
def test_every_waiting_position_takes_its_own(
    drawn: tuple[int, int | None, int, int], num_ahead: int, num_hits: int, num_extra: int
) -> None:
    """What waits is what an engine attends to later, less hits, with some kept beyond a window."""
    block, window, num_remote, num_wanted = drawn
    # Position -> id, 0 where the peer has given a window's block back.
    has = {token // block for token in attended(num_remote, window)}
    count = (num_remote + block - 1) // block
    remote = {n: 100 + n if n in has else 0 for n in range(count)}
    needs = {token // block for token in attended(num_wanted, window)}
    needs |= {max(0, n - num_extra) for n in needs} if window is not None else set()
    end = (num_wanted + block - 1) // block
    waiting = [n for n in range(min(needs, default=end), end + num_ahead) if n >= num_hits]
    listed = list(remote.values())
    if window is not None:
        listed = listed[-((window + block - 1) // block + 1) :]
        remote = dict(list(remote.items())[-len(listed) :])
    arguments = (
        Group(block, is_window=window is not None),
        [500 + n for n in waiting],
        waiting[0] if waiting else end,
        listed,
    )
    read = [n for n in waiting if n < end]
    if not all(remote.get(n) for n in read):
        with pytest.raises(RequestError) as caught:
            pair(*arguments, num_tokens=num_wanted, num_remote_tokens=num_remote)
        assert caught.value.code == "remote-blocks"
        return
    both = pair(*arguments, num_tokens=num_wanted, num_remote_tokens=num_remote)
    assert both == ([500 + n for n in read], [remote[n] for n in read])


@given(sequences())
def test_a_window_of_as_many_tokens_is_always_served(
    drawn: tuple[int, int | None, int, int],
) -> None:
    """As stock would: nothing that is attended to lies before what a window's list holds."""
    block, window, num_tokens, _ = drawn
    ids = list(range(-(-num_tokens // block)))
    waiting = sorted({token // block for token in attended(num_tokens, window)})
    remote = [100 + n for n in ids]
    if window is not None:
        remote = remote[-(-(-window // block) + 1) :]
    local, _ = pair(
        Group(block, is_window=window is not None),
        waiting,
        min(waiting, default=len(ids)),
        remote,
        num_tokens=num_tokens,
        num_remote_tokens=num_tokens,
    )
    assert local == waiting


def test_blocks_that_the_peer_lists_ahead_of_its_tokens() -> None:
    ahead = Group(16, is_ahead=True)
    both = pair(ahead, [70, 71], 1, [5, 6, 7, 8, 9], num_tokens=48, num_remote_tokens=48)
    assert both == ([70, 71], [6, 7])
    with pytest.raises(RequestError, match="2 blocks"):
        pair(ahead, [70], 1, [5, 6], num_tokens=48, num_remote_tokens=48)


def test_the_peers_null_block_holds_no_tokens() -> None:
    """In front of a window vLLM lists it; where tokens are needed it is nobody's page."""
    window = Group(16, is_window=True)
    both = pair(window, [71, 72], 1, [0, 6, 7], num_tokens=48, num_remote_tokens=48)
    assert both == ([71, 72], [6, 7])
    for group in (window, FULL):
        with pytest.raises(RequestError, match="blocks that hold tokens"):
            pair(group, [70, 71, 72], 0, [0, 6, 7], num_tokens=48, num_remote_tokens=48)


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
