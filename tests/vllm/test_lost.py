"""When a peer that was lost may be asked again; needs no vLLM."""

from __future__ import annotations

from kvpd.vllm.lost import FORGOTTEN_SECONDS, MAX_PAUSE_SECONDS, LostPeers


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_first_loss_costs_no_pause_and_further_ones_ever_longer_ones() -> None:
    clock = Clock()
    lost = LostPeers(clock)
    assert lost.known() == [] and lost.pause_seconds("P") == 0
    pauses = []
    for _ in range(6):
        lost.note("P")
        lost.note("P")  # every handle of a request fails
        assert lost.known() == ["P"] and lost.is_known("P") and not lost.is_known("Q")
        pauses.append(lost.let_go("P"))
        assert lost.known() == [] and lost.pause_seconds("P") == pauses[-1]
        clock.now += pauses[-1]
        assert lost.pause_seconds("P") == 0
    assert pauses == [0, 1, 2, 4, 8, MAX_PAUSE_SECONDS]


def test_what_was_read_starts_from_the_beginning() -> None:
    lost = LostPeers(Clock())
    for _ in range(3):
        lost.note("P")
        lost.let_go("P")
    lost.was_read("P")
    assert lost.pause_seconds("P") == 0
    lost.note("P")
    lost.was_read("P")
    assert lost.known() == ["P"], "a read that was under way ended well; the loss is newer"
    assert lost.let_go("P") == 0


def test_an_address_that_does_not_answer_counts_for_lost_peers_only() -> None:
    clock = Clock()
    lost = LostPeers(clock)
    lost.unreachable("P")
    assert lost.pause_seconds("P") == 0, "as stock: each request asks"
    lost.note("P")
    lost.let_go("P")
    found = []
    for _ in range(3):
        lost.unreachable("P")
        found.append(lost.pause_seconds("P"))
        clock.now += found[-1]
    assert found == [1, 2, 4]


def test_what_was_lost_long_ago_is_forgotten() -> None:
    clock = Clock()
    lost = LostPeers(clock)
    for number in range(100):
        lost.note(f"P{number}")
        lost.let_go(f"P{number}")
        clock.now += FORGOTTEN_SECONDS / 10
    assert len(lost._losses) <= 11
    for _ in range(3):
        lost.note("P")
        lost.let_go("P")
    clock.now += MAX_PAUSE_SECONDS + FORGOTTEN_SECONDS
    lost.note("P")
    assert lost.let_go("P") == 0
