"""All measurements of one run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton

from kvpd import __version__
from kvpd.cli.convert_bench.timing import Timing, on_gpu, on_host
from kvpd.cli.write_bench.contestants import (
    JOBS,
    Engines,
    Work,
    aiter_fused,
    kvpd,
    separate,
)
from kvpd.cli.write_bench.workloads import QWEN3_8B, Order, Shape, Workload, make_workload
from kvpd.errors import KvpdError
from kvpd.write import WriteTuning

Figures = dict[str, Any]
DECODES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CHUNKS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
FORMATS = (
    Shape("packed", 36, 32, 8, 16, 128, family="packed"),
    Shape("V transposed", 36, 32, 8, 16, 128, family="transposed"),
    Shape("fp8", 36, 32, 8, 16, 128, cache_dtype="float8_e4m3fn"),
    Shape("N32", 36, 32, 8, 32, 128),
    Shape("H2 D64", 36, 14, 2, 16, 64),
    Shape("H1 D128", 36, 8, 1, 16, 128),
)


def measure(
    sections: Sequence[str],
    *,
    device: int,
    repeat: int,
    writer_source: Path | None,
    aiter: Path | None,
    progress: Callable[[str], None],
) -> Figures:
    """Check and time; returns everything as plain data.

    Raises:
        KvpdError: there is no such GPU.
    """
    if device >= torch.cuda.device_count():
        raise KvpdError(
            f"torch sees no GPU {device}; what was measured elsewhere can be read with --from-json",
            code="no-gpu",
            field="device",
            got=torch.cuda.device_count(),
            expected=f"a GPU {device}",
        )
    torch.cuda.set_device(device)
    bench = _Bench(torch.device("cuda", device), repeat, Engines(writer_source, aiter), progress)
    for section in sections:
        progress(f"section {section}")
        getattr(bench, section)()
    return bench.figures


def _batches() -> Iterator[tuple[Order, int]]:
    yield from product(("decode",), DECODES)
    yield from product(("chunk",), CHUNKS)


class _Bench:
    def __init__(
        self,
        device: torch.device,
        repeat: int,
        engines: Engines,
        progress: Callable[[str], None],
    ) -> None:
        self.device, self.repeat = device, repeat
        self.engines, self.progress = engines, progress
        self.figures: Figures = {
            "device": torch.cuda.get_device_name(device),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "kvpd": __version__,
            "repeat": repeat,
            "missing": engines.missing,
            "rows": [],
            "host": [],
        }

    def main(self) -> None:
        """Qwen3-8B, shuffled pages: every batch and job against vLLM's separate kernels."""
        for order, num_tokens in _batches():
            workload = make_workload(QWEN3_8B, num_tokens, order, self.device)
            for job in JOBS:
                theirs = separate(workload, job, self.engines)
                self._row("main", workload, order, num_tokens, job, theirs, "vLLM")

    def formats(self) -> None:
        """Other pages, AITER's fused kernel where it writes them."""
        for shape, (order, num_tokens) in product(
            FORMATS, (("decode", 1), ("decode", 32), ("decode", 128), ("chunk", 2048))
        ):
            workload = make_workload(shape, num_tokens, order, self.device)  # type: ignore[arg-type]
            theirs = aiter_fused(workload, "rope", self.engines)
            self._row("formats", workload, order, num_tokens, "rope", theirs, "AITER")

    def sweep(self) -> None:
        """Kernel tunings, for those who want the last percent."""
        few = [(1, heads, warps) for heads in (1, 2, 4, 8) for warps in (1, 2) if warps <= heads]
        many = [
            (rows, heads, warps)
            for rows, heads, warps in product((8, 16, 32), (1, 2, 4), (1, 2, 4, 8))
            if 8 <= rows * heads // warps <= 32
        ]
        batches: tuple[tuple[Order, int, list[tuple[int, int, int]]], ...] = (
            ("decode", 1, few),
            ("decode", 32, few),
            ("decode", 128, [*few, (2, 4, 2), (4, 4, 4), (4, 2, 2)]),
            ("decode", 256, [*few, (2, 4, 2), (4, 4, 4), *many]),
            ("chunk", 256, [*few, *many]),
            ("chunk", 2048, [(1, 4, 1), *many]),
        )
        for order, num_tokens, tunings in batches:
            workload = make_workload(QWEN3_8B, num_tokens, order, self.device)
            for job, tuning in product(("rope", "write"), tunings):
                chosen = WriteTuning(*tuning)
                timing = on_gpu(kvpd(workload, job, chosen), self.repeat, calls=1)
                self._add("sweep", workload, order, num_tokens, job, "kvpd", timing, None, chosen)

    def host(self) -> None:
        """What one layer's call takes the host, where it is not in a graph."""
        for job in JOBS:
            workload = make_workload(QWEN3_8B, 2048, "chunk", self.device, layers=1)
            works = {"kvpd": kvpd(workload, job), "vLLM": separate(workload, job, self.engines)}
            for who, work in works.items():
                if work is not None:
                    timing = on_host(work, 10 * self.repeat)
                    self.figures["host"].append({"job": job, "who": who, "timing": timing.asdict()})

    def _row(
        self,
        section: str,
        workload: Workload,
        order: str,
        num_tokens: int,
        job: str,
        theirs: Work | None,
        who: str,
    ) -> None:
        # AITER rotates in 16-bit arithmetic: other last bits, nothing to compare.
        right = self._is_right(workload, job, theirs if who == "vLLM" else None)
        ours = kvpd(workload, job)
        timing = on_gpu(ours, self.repeat, calls=1)
        self._add(section, workload, order, num_tokens, job, "kvpd", timing, right, None)
        if theirs is not None:
            timing = on_gpu(theirs, self.repeat, calls=1)
            self._add(section, workload, order, num_tokens, job, who, timing, None, None)

    def _is_right(self, workload: Workload, job: str, theirs: Work | None) -> bool:
        """Whether Q, K and all of the cache are, bit for bit, as the other kernels leave them.

        Without others: as the reference does.
        """
        before = [tensor.clone() for tensor in _state(workload)]
        kvpd(workload, job)()
        ours = [tensor.clone() for tensor in _state(workload)]
        _restore(workload, before)
        (theirs or kvpd(workload, job, implementation="reference"))()
        expected = _state(workload)
        same = all(torch.equal(_bits(a), _bits(b)) for a, b in zip(ours, expected, strict=True))
        changed = not torch.equal(before[0], ours[0])
        _restore(workload, before)
        if not (same and changed):
            self.progress(f"WRONG BITS: {workload.shape.name} {job}")
        return same and changed

    def _add(
        self,
        section: str,
        workload: Workload,
        order: str,
        num_tokens: int,
        job: str,
        who: str,
        timing: Timing,
        right: bool | None,
        tuning: WriteTuning | None,
    ) -> None:
        row = {
            "section": section,
            "name": workload.shape.name,
            "order": order,
            "tokens": num_tokens,
            "job": job,
            "who": who,
            "layers": workload.pages.num_layers,
            "timing": timing.asdict(),
            "right": right,
            "tuning": asdict(tuning) if tuning is not None else None,
        }
        self.figures["rows"].append(row)
        self.progress(
            f"  {row['name']} {order} {num_tokens} {job} {who} {timing.median_us:.1f} us"
            f"{'' if right is None else ' right' if right else ' WRONG'}"
            f" {tuning if tuning is not None else ''}"
        )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def _state(workload: Workload) -> list[torch.Tensor]:
    """Everything a job may write."""
    found = [workload.memory]
    for layer in workload.layers:
        found += [layer.rows, layer.query_out, layer.key_out]
    return found


def _restore(workload: Workload, state: list[torch.Tensor]) -> None:
    for tensor, saved in zip(_state(workload), state, strict=True):
        tensor.copy_(saved)
