"""Work that a transfer disturbs: what the decoder's GPU does meanwhile."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvpd.cli.transfer_bench.arms import Arm
from kvpd.cli.transfer_bench.patterns import Workload
from kvpd.errors import TransferError

# torch's events and streams have no types.
_cuda: Any = torch.cuda
_COPY_BYTES = 1 << 30
_MATRIX = 8192
_ROUNDS = 7
_MAX_CALLS = 4096


@dataclass(frozen=True)
class Victim:
    """One operation, repeated back to back on a stream of its own.

    Attributes:
        name: "bandwidth-bound" or "compute-bound".
        call: enqueue it once.
    """

    name: str
    call: Callable[[], None]


def make_victims(device: torch.device) -> list[Victim]:
    """A copy of 1 GiB, and a bfloat16 product of two square matrices."""
    source = torch.zeros(_COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    left = torch.randn(_MATRIX, _MATRIX, dtype=torch.bfloat16, device=device)
    right = torch.randn_like(left)
    product = torch.empty_like(left)

    def copy() -> None:
        target.copy_(source)

    def multiply() -> None:
        torch.mm(left, right, out=product)

    return [Victim("bandwidth-bound", copy), Victim("compute-bound", multiply)]


def slowdown_seconds(victim: Victim, arm: Arm, workload: Workload) -> dict[str, float]:
    """How much longer the victim takes when the workload is moved beside it.

    The victim's calls are enqueued first and outlast the transfer; alone and beside take turns.

    Returns:
        `alone` and `beside`: median seconds of `calls` calls; `slowdown`: the median difference;
        `transfer`: median seconds of the transfer beside it.

    Raises:
        TransferError: no number of calls outlasts the transfer.
    """
    stream = _cuda.Stream()
    alone_seconds, _, _ = _elapsed(victim, 8, stream, None)
    seconds = arm.run(workload).total_seconds
    calls = max(4, math.ceil(2 * seconds / (alone_seconds / 8)))
    alone: list[float] = []
    beside: list[float] = []
    transfer: list[float] = []
    while len(beside) < _ROUNDS:
        if calls > _MAX_CALLS:
            raise TransferError(
                f"{calls} calls of the {victim.name} victim", code="victim", field=arm.name
            )
        quiet, _, _ = _elapsed(victim, calls, stream, None)
        busy, moved, outlasted = _elapsed(
            victim, calls, stream, lambda: arm.run(workload).total_seconds
        )
        if not outlasted:
            # The rest of the transfer ran beside nothing: not a sample.
            calls *= 2
            alone, beside, transfer = [], [], []
            continue
        alone.append(quiet)
        beside.append(busy)
        transfer.append(moved)
    differences = np.array(beside) - np.array(alone)
    return {
        "calls": calls,
        "alone": float(np.median(alone)),
        "beside": float(np.median(beside)),
        "slowdown": float(np.median(differences)),
        "slowdown_p10": float(np.percentile(differences, 10)),
        "slowdown_p90": float(np.percentile(differences, 90)),
        "transfer": float(np.median(transfer)),
    }


def _elapsed(
    victim: Victim, calls: int, stream: Any, beside: Callable[[], float] | None
) -> tuple[float, float, bool]:
    """(seconds of the calls, seconds of `beside`, whether the calls outlasted it)."""
    torch.cuda.synchronize()
    start, end = _cuda.Event(enable_timing=True), _cuda.Event(enable_timing=True)
    with _cuda.stream(stream):
        start.record()
        for _ in range(calls):
            victim.call()
        end.record()
    moved = beside() if beside is not None else 0.0
    outlasted = not end.query()
    end.synchronize()
    return start.elapsed_time(end) * 1e-3, moved, outlasted
