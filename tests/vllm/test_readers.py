"""Which request may read a remote one; needs no vLLM."""

from __future__ import annotations

from kvpd.vllm.readers import MAX_REMEMBERED, Readers


def test_one_reader_and_none_after_the_notice() -> None:
    readers = Readers()
    assert readers.begin("P", "r", "a") and readers.begin("P", "r", "a")
    assert not readers.begin("P", "r", "b")
    assert readers.begin("Q", "r", "b"), "another engine's request of that name"
    readers.end("a", is_released=True)
    assert not readers.begin("P", "r", "b") and not readers.begin("P", "r", "a")
    readers.end("b", is_released=True)
    readers.end("b", is_released=False)
    assert not readers.begin("Q", "r", "c")


def test_a_read_without_a_notice_may_be_tried_again() -> None:
    readers = Readers()
    assert readers.begin("P", "r", "a")
    readers.end("a", is_released=False)
    assert readers.begin("P", "r", "b")
    assert not readers.begin("P", "r", "a")


def test_what_is_remembered_is_bounded() -> None:
    readers = Readers()
    for number in range(MAX_REMEMBERED + 1):
        assert readers.begin("P", f"r{number}", f"a{number}")
        if number % 2:
            readers.end(f"a{number}", is_released=True)
    assert not readers.begin("P", "r1", "late") and not readers.begin("P", "r2", "late")
    assert readers.begin("P", "r0", "late"), "the oldest is forgotten"
    assert len(readers._readers) == MAX_REMEMBERED
    assert len(readers._remotes) <= MAX_REMEMBERED // 2 + 1


def test_the_first_notice_of_a_remote_request_is_somebodys() -> None:
    """What the peer released at our notice is proved for the request of the first one alone."""
    readers = Readers()
    assert readers.notifies("P", "r", "a") and readers.notifies("P", "r", "a")
    assert not readers.notifies("P", "r", "b")
    assert readers.notifies("Q", "r", "b")
    readers.begin("P", "r", "a")
    readers.end("a", is_released=False)
    assert not readers.notifies("P", "r", "c"), "a notice may be under way still"
    for number in range(MAX_REMEMBERED):
        readers.notifies("P", f"more-{number}", "x")
    assert len(readers._notified) == MAX_REMEMBERED
