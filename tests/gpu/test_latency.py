"""Gaps between tokens, on times that are written down."""

from __future__ import annotations

import pytest

from tests.gpu.latency import disturbance


def test_gaps_of_an_arrival_are_told_from_the_others() -> None:
    # Tokens every 2 ms; an arrival at 7 ms makes one gap 10 ms and the next 3 ms.
    stamps = [0.000, 0.002, 0.004, 0.006, 0.016, 0.019, 0.021, 0.023]
    event = {"arrived": 0.007, "taken_in": 0.001, "first_token": 0.019}
    found = disturbance(stamps, [event])
    assert found.base == pytest.approx(2.0)
    assert found.busy == pytest.approx((9.0 + 3.0) / 2)
    assert found.worst == [pytest.approx(9.0)]
    assert found.extra == [pytest.approx(9.0 + 3.0 - 2 * 2.0)]
    assert found.first_token == [pytest.approx(12.0)]
    assert found.converting == []


def test_an_arrival_that_changes_nothing() -> None:
    stamps = [0.002 * index for index in range(10)]
    event = {"arrived": 0.0061, "taken_in": 0.0, "first_token": 0.010}
    found = disturbance(stamps, [event])
    assert found.worst == [pytest.approx(2.0)]
    assert found.extra == [pytest.approx(0.0)]


def test_each_arrival_has_its_own_gaps() -> None:
    stamps = [0.0, 0.002, 0.012, 0.014, 0.016, 0.036, 0.038]
    events = [
        {"arrived": 0.003, "taken_in": 0.0, "first_token": 0.012},
        {"arrived": 0.017, "taken_in": 0.0, "first_token": 0.036},
    ]
    found = disturbance(stamps, events)
    assert found.base == pytest.approx(2.0)
    assert found.worst == [pytest.approx(10.0), pytest.approx(20.0)]


def test_gaps_of_a_conversion_are_the_two_after_the_one_it_was_enqueued_in() -> None:
    stamps = [0.0, 0.002, 0.012, 0.0145, 0.0175, 0.0215, 0.0235, 0.0255, 0.0275, 0.0295]
    event = {"arrived": 0.003, "taken_in": 0.0, "converted": 0.011, "first_token": 0.0215}
    found = disturbance(stamps, [event])
    assert found.base == pytest.approx(2.0)
    assert found.converting == [pytest.approx(0.5 + 1.0)]
