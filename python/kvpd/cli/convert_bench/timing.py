"""Timing: contestants take turns in one loop, medians with their spread."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

Work = Callable[[], None]

# torch's events and streams have no types.
_cuda: Any = torch.cuda


@dataclass(frozen=True)
class Timing:
    """Microseconds per call."""

    median_us: float
    p10_us: float
    p90_us: float

    def asdict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def _timing(samples_us: list[float]) -> Timing:
    p10, median, p90 = np.percentile(samples_us, [10, 50, 90])
    return Timing(float(median), float(p10), float(p90))


def interleaved(
    works: Mapping[str, Work], repeat: int, ahead: Work | None = None
) -> dict[str, Timing]:
    """Time between two events around each work, all works in turn in every round.

    The order rotates: what a work leaves in the caches must not favour the same neighbour always.

    Args:
        ahead: untimed work that begins each round. While the GPU does it, the host enqueues the
            rest; without it, the GPU waits for the host inside the first interval.
    """
    names = list(works)
    for work in works.values():
        work()
        work()
    torch.cuda.synchronize()
    samples: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(repeat):
        events = []
        if ahead is not None:
            ahead()
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            start = _cuda.Event(enable_timing=True)
            end = _cuda.Event(enable_timing=True)
            start.record()
            works[name]()
            end.record()
            events.append((name, start, end))
        torch.cuda.synchronize()
        for name, start, end in events:
            samples[name].append(start.elapsed_time(end) * 1e3)
    return {name: _timing(values) for name, values in samples.items()}


def on_host(work: Work, repeat: int) -> Timing:
    """Time until the call returns, the GPU idle before each."""
    for _ in range(10):
        work()
    samples = []
    for _ in range(repeat):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        samples.append((time.perf_counter() - start) * 1e6)
    torch.cuda.synchronize()
    return _timing(samples)


def until_done(work: Work, repeat: int) -> Timing:
    """Time until the call has returned and the GPU has done its work, idle before each."""

    def and_wait() -> None:
        work()
        torch.cuda.synchronize()

    return on_host(and_wait, repeat)


def on_gpu(work: Work, repeat: int, calls: int = 50) -> Timing:
    """Time per call of `calls` calls in one CUDA graph: the GPU's own, without the host's."""
    stream = _cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        work()
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(calls):
                work()
    samples = []
    for _ in range(repeat + 3):
        start = _cuda.Event(enable_timing=True)
        end = _cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end) * 1e3 / calls)
    return _timing(samples[3:])
