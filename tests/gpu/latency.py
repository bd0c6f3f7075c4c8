"""What arrivals do to a running request, from the times of its tokens."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median


@dataclass(frozen=True)
class Disturbance:
    """Inter-token latency of a running request, in milliseconds.

    Attributes:
        base: median gap between two tokens while nothing arrives.
        busy: mean gap between an arrival and its first token, over all of them.
        worst: for each arrival, the longest gap until its first token.
        extra: for each arrival, how much later than without it the running request was then.
        first_token: for each arrival, from its arrival to its first token.
        converting: for each arrival that was converted, how much longer than usual the two gaps
            were, together, that follow the one in which its conversion was enqueued.
    """

    base: float
    busy: float
    worst: list[float]
    extra: list[float]
    first_token: list[float]
    converting: list[float]


def disturbance(stamps: Sequence[float], events: Sequence[dict[str, float]]) -> Disturbance:
    """Compare the gaps that end between an arrival and its first token with the others.

    Args:
        stamps: seconds, when each token came out.
        events: `arrived`, `taken_in` and `first_token` of each arrival, in seconds, and
            `converted` where a conversion was enqueued. What the process spent on taking the
            request in is no part of a gap: a server does that in another process.
    """
    quiet: list[float] = []
    busy: list[list[float]] = [[] for _ in events]
    for before, after in pairwise(stamps):
        for event, gaps in zip(events, busy, strict=True):
            if event["arrived"] < after <= event["first_token"]:
                taken_in = event["taken_in"] if event["arrived"] >= before else 0.0
                gaps.append(1e3 * (after - before - taken_in))
                break
        else:
            quiet.append(1e3 * (after - before))
    base = median(quiet)
    converting = []
    for event in events:
        if "converted" in event:
            after = bisect_left(stamps, event["converted"])
            gaps = [b - a for a, b in pairwise(stamps[after : after + 3])]
            converting.append(1e3 * sum(gaps) - base * len(gaps))
    return Disturbance(
        base=base,
        busy=fmean(gap for gaps in busy for gap in gaps),
        worst=[max(gaps, default=0.0) for gaps in busy],
        extra=[sum(gaps) - base * len(gaps) for gaps in busy],
        first_token=[1e3 * (event["first_token"] - event["arrived"]) for event in events],
        converting=converting,
    )
