"""The demo's result as text, and as JSON values."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from kvpd._kvpd import Reason
from kvpd.cli.demo.result import DemoResult, PlacementResult, Refusal
from kvpd.request import Failed, Outcome, Ready


def as_text(result: DemoResult) -> Iterator[str]:
    """Lines to print."""
    scenario = result.scenario
    for side, process, format, layout, num_blocks in (
        ("prefill", result.prefill_pid, result.prefill_format, "LBHNC", scenario.prefill_blocks),
        ("decode", os.getpid(), result.decode_format, "LHBNC", scenario.decode_blocks),
    ):
        yield f"{side:<9} {format.name} in {layout}"
        yield f"          {scenario.layers} layers of {num_blocks} blocks, process {process}"
    for placement in result.placements:
        yield ""
        yield from _placement_lines(placement)
    yield ""
    yield "pairs that must be refused"
    for refusal in result.refusals:
        yield from _refusal_lines(refusal)
    yield ""
    yield "PASS" if result.holds else "FAIL"


def as_json(result: DemoResult) -> dict[str, Any]:
    """Plain values; ``holds`` says what the exit status says."""
    return {
        "holds": result.holds,
        "scenario": result.scenario.to_json(),
        "prefill_format": result.prefill_format.name,
        "decode_format": result.decode_format.name,
        "placements": [_placement_json(placement) for placement in result.placements],
        "refusals": [
            {
                "name": refusal.name,
                "holds": refusal.holds,
                "was_registered": refusal.was_registered,
                "reasons": [_reason_json(reason) for reason in refusal.reasons],
            }
            for refusal in result.refusals
        ],
    }


def _placement_lines(result: PlacementResult) -> Iterator[str]:
    yield f"placement {result.placement}"
    yield f"  verdict      {result.verdict!s}"
    yield (
        "  request       blocks       MB   descriptors: planned  merged  by NIXL"
        "   READ ms   GB/s  conversion ms   GB/s"
    )
    for position, outcome in enumerate(result.outcomes):
        if position == result.num_alone:
            yield "  in flight together; these times include each other's:"
        yield _outcome_line(outcome) + ("  connects" if position == 0 else "")
    num_bytes = sum(o.num_bytes for o in result.outcomes if isinstance(o, Ready))
    yield (
        f"  in all       {num_bytes / 1e6:.1f} MB in {result.wall_seconds * 1e3:.1f} ms, "
        f"{_rate(num_bytes, result.wall_seconds):.2f} GB/s, conversion included"
    )
    released = len(result.notices)
    yield (
        f"  prefill      {released} release notices for {len(result.expected_notices)} requests, "
        f"pages {'unchanged' if result.prefill_unchanged else 'CHANGED'}"
    )
    comparison = result.comparison
    yield (
        f"  check        {comparison.num_bytes:,} bytes of the decoder's cache (pages, unused "
        f"blocks, guards) against an independent writer: {comparison.num_wrong:,} differ"
    )
    if comparison.first_wrong:
        yield f"               {comparison.first_wrong}"
    yield f"  {'PASS' if result.holds else 'FAIL'}"


def _outcome_line(outcome: Outcome) -> str:
    if isinstance(outcome, Failed):
        return f"  {outcome.request_id:<12} failed ({outcome.code}): {outcome.reason}"
    counts, timings = outcome.descriptors, outcome.timings
    read_rate = _rate(outcome.num_bytes, timings.read_seconds)
    convert_rate = _rate(outcome.num_bytes, timings.convert_seconds)
    counted = "-" if counts.counted is None else f"{counts.counted:,}"
    return (
        f"  {outcome.request_id:<12} {outcome.num_blocks:>7,} {outcome.num_bytes / 1e6:>8.1f}"
        f" {counts.planned:>22,} {counts.merged:>7,} {counted:>8}"
        f" {timings.read_seconds * 1e3:>9.2f} {read_rate:>6.2f}"
        f" {timings.convert_seconds * 1e3:>14.2f} {convert_rate:>6.2f}"
    )


def _refusal_lines(refusal: Refusal) -> Iterator[str]:
    status = "refused" if refusal.holds else f"FAIL, expected {refusal.expected_code}"
    registered = ", but REGISTERED" if refusal.was_registered else ""
    yield f"  {refusal.name}: {status}{registered}"
    for reason in refusal.reasons:
        yield f"    {reason.code}: {reason.field} is {reason.local} here, {reason.remote} there"
        yield f"      {reason.remedy}"


def _placement_json(result: PlacementResult) -> dict[str, Any]:
    return {
        "placement": result.placement,
        "holds": result.holds,
        "verdict": result.verdict.kind,
        "requests_alone": result.num_alone,
        "wall_seconds": result.wall_seconds,
        "requests": [_outcome_json(outcome) for outcome in result.outcomes],
        "notices": list(result.notices),
        "prefill_unchanged": result.prefill_unchanged,
        "bytes_compared": result.comparison.num_bytes,
        "bytes_wrong": result.comparison.num_wrong,
        "first_wrong": result.comparison.first_wrong,
    }


def _outcome_json(outcome: Outcome) -> dict[str, Any]:
    if isinstance(outcome, Failed):
        return {
            "request_id": outcome.request_id,
            "ready": False,
            "code": outcome.code,
            "reason": outcome.reason,
        }
    return {
        "request_id": outcome.request_id,
        "ready": True,
        "blocks": outcome.num_blocks,
        "bytes": outcome.num_bytes,
        "descriptors_planned": outcome.descriptors.planned,
        "descriptors_merged": outcome.descriptors.merged,
        "descriptors_counted": outcome.descriptors.counted,
        "queued_seconds": outcome.timings.queued_seconds,
        "read_seconds": outcome.timings.read_seconds,
        "convert_seconds": outcome.timings.convert_seconds,
    }


def _reason_json(reason: Reason) -> dict[str, str]:
    return {
        "code": reason.code,
        "field": reason.field,
        "local": reason.local,
        "remote": reason.remote,
        "remedy": reason.remedy,
    }


def _rate(num_bytes: int, seconds: float) -> float:
    """GB/s; 0 when nothing was timed."""
    return num_bytes / seconds / 1e9 if seconds > 0 else 0.0
