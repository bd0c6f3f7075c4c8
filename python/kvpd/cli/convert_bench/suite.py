"""All measurements of one run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton

from kvpd import __version__
from kvpd.cli.convert_bench.baselines import slots_of, torch_operations, writer_again
from kvpd.cli.convert_bench.sweep import tunings
from kvpd.cli.convert_bench.timing import Timing, Work, interleaved, on_gpu, on_host, until_done
from kvpd.cli.convert_bench.workloads import (
    QWEN3_8B,
    SHAPES,
    Cache,
    Ids,
    Placement,
    Shape,
    make_cache,
    make_ids,
)
from kvpd.cli.convert_bench.writer import load_kernel, writer_source
from kvpd.convert import Pages, prepare
from kvpd.convert.launch import TritonConversion
from kvpd.convert.plan import Tuning
from kvpd.errors import KvpdError, MissingDependencyError

Figures = dict[str, Any]


def measure(
    sections: Sequence[str],
    *,
    device: int,
    repeat: int,
    shrink: int,
    writer_source: Path | None,
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
    bench = _Bench(torch.device("cuda", device), repeat, shrink, writer_source, progress)
    for section in sections:
        progress(f"section {section}")
        getattr(bench, section)()
    return bench.figures


class _Bench:
    def __init__(
        self,
        device: torch.device,
        repeat: int,
        shrink: int,
        source: Path | None,
        progress: Callable[[str], None],
    ) -> None:
        self.device = device
        self.repeat = repeat
        self.shrink = shrink
        self.progress = progress
        self.kernel, self.no_writer = _find_writer(source)
        self.figures: Figures = {
            "device": torch.cuda.get_device_name(device),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "kvpd": __version__,
            "repeat": repeat,
            "shrink": shrink,
            "writer": self.no_writer or "vLLM's reshape_and_cache_shuffle_kernel",
            "rows": [],
            "launch": [],
        }

    def main(self) -> None:
        """Qwen3-8B at 4k and 16k tokens, every placement and order of ids, both baselines."""
        for tokens in (4096, 16384):
            count = max(1, tokens // QWEN3_8B.tokens // self.shrink)
            name = f"Qwen3-8B {tokens // 1024}k"
            orders: tuple[Ids, ...] = ("random", "sorted", "contiguous")
            for ids in orders:
                baselines = ids == "random" and tokens == 4096
                self._row("main", name, QWEN3_8B, count, ids, "in-place", baselines=baselines)
            for ids in orders[::2]:
                self._row("main", name, QWEN3_8B, count, ids, "staged")
            self._row("main", name, QWEN3_8B, count, "random", "in-place", reverse=True)

    def shapes(self) -> None:
        """Every shape at about 400 MB, random ids."""
        for shape in SHAPES:
            count = max(1, 400_000_000 // shape.block_bytes // self.shrink)
            self._row("shapes", shape.name, shape, count, "random", "in-place")
            self._row("shapes", shape.name, shape, count, "random", "staged")
            self._row("shapes", shape.name, shape, count, "random", "in-place", reverse=True)

    def sweep(self) -> None:
        """Kernel tunings, for those who want the last percent."""
        for placement in ("in-place", "staged"):
            self._sweep(QWEN3_8B, max(1, 256 // self.shrink), "random", placement)
        for shape in SHAPES:
            if shape.name in ("Qwen3-8B N32", "H8 D64", "H8 D64 fp8", "H16 N32 D256 (512 KiB)"):
                count = max(1, 400_000_000 // shape.block_bytes // self.shrink)
                self._sweep(shape, count, "random", "in-place")

    def launch(self) -> None:
        """What a call costs when there is little to convert."""
        for count in (1, 4, 16, 64):
            target = self._cache(QWEN3_8B, 256, 2, reverse=False)
            source = target.pages.seen_as(QWEN3_8B.formats()[0])
            ids = make_ids("random", count, 256, self.device)
            conversion = TritonConversion(source, target.pages)
            conversion.warm_up()
            works: dict[str, Work] = {"kvpd": partial(conversion, ids, ids)}
            works |= self._baselines(QWEN3_8B, target.pages, ids)
            for name, work in works.items():
                row: dict[str, Any] = {"blocks": count, "who": name}
                row["until_done"] = until_done(work, self.repeat).asdict()
                row["host"] = on_host(work, self.repeat).asdict()
                row["gpu"] = on_gpu(work, self.repeat).asdict() if name == "kvpd" else None
                self.figures["launch"].append(row)

    def _row(
        self,
        section: str,
        name: str,
        shape: Shape,
        count: int,
        ids_kind: Ids,
        placement: Placement,
        *,
        reverse: bool = False,
        baselines: bool = False,
    ) -> None:
        source, target, ids_in, ids_out = self._workload(shape, count, ids_kind, placement, reverse)
        conversion = prepare(source, target.pages)
        conversion.warm_up()
        right = self._is_right(source, target, ids_in, ids_out)
        ours = partial(conversion, ids_in, ids_out)
        num_bytes = count * shape.block_bytes
        timings = self._against_copy({"kvpd": ours}, num_bytes)
        copy = timings.pop("copy")
        if baselines:
            # In graphs: between two events they would be timed by how fast the host enqueues them.
            works = self._baselines(shape, target.pages, ids_out)
            timings |= {who: on_gpu(work, 10, calls=3) for who, work in works.items()}
        for who, timing in timings.items():
            self._add(
                section, name, who, placement, ids_kind, reverse, num_bytes, timing, copy, right
            )

    def _sweep(self, shape: Shape, count: int, ids_kind: Ids, placement: Placement) -> None:
        source, target, ids_in, ids_out = self._workload(shape, count, ids_kind, placement, False)
        num_bytes = count * shape.block_bytes
        page_bytes = shape.formats()[0].page_bytes
        for tuning in tunings(placement, page_bytes):
            works = {"kvpd": self._tuned(source, target.pages, ids_in, ids_out, tuning)}
            timings = self._against_copy(works, num_bytes)
            self._add(
                "sweep", shape.name, "kvpd", placement, ids_kind, False, num_bytes,
                timings["kvpd"], timings["copy"], True, asdict(tuning),
            )  # fmt: skip

    @staticmethod
    def _tuned(
        source: Pages, target: Pages, ids_in: torch.Tensor, ids_out: torch.Tensor, tuning: Tuning
    ) -> Work:
        conversion = TritonConversion(source, target, tuning)
        return partial(conversion, ids_in, ids_out)

    def _workload(
        self, shape: Shape, count: int, ids_kind: Ids, placement: Placement, reverse: bool
    ) -> tuple[Pages, Cache, torch.Tensor, torch.Tensor]:
        num_blocks = count * 3 // 2 + 1
        source_format = shape.formats()[1 if reverse else 0]
        target = self._cache(shape, num_blocks, 1 if reverse else 2, reverse=reverse)
        ids_out = make_ids(ids_kind, count, num_blocks, self.device)
        if placement == "in-place":
            return target.pages.seen_as(source_format), target, ids_out, ids_out
        slab = make_cache(source_format, shape.layers, count, 1, self.device)
        return slab.pages, target, make_ids("contiguous", count, count, self.device), ids_out

    def _cache(self, shape: Shape, num_blocks: int, pieces: int, *, reverse: bool) -> Cache:
        target_format = shape.formats()[0 if reverse else 1]
        return make_cache(target_format, shape.layers, num_blocks, pieces, self.device)

    def _is_right(
        self, source: Pages, target: Cache, ids_in: torch.Tensor, ids_out: torch.Tensor
    ) -> bool:
        """Whether the kernels leave all of the cache's memory as the reference does."""
        before = target.memory.clone()
        prepare(source, target.pages, implementation="reference")(ids_in, ids_out)
        expected = target.memory.clone()
        target.memory.copy_(before)
        prepare(source, target.pages)(ids_in, ids_out)
        same = torch.equal(target.memory, expected)
        changed = not torch.equal(target.memory, before)
        if not (same and changed):
            self.progress("WRONG BYTES")
        return same and changed

    def _baselines(self, shape: Shape, pages: Pages, ids: torch.Tensor) -> dict[str, Work]:
        works: dict[str, Work] = {"torch": lambda: torch_operations(shape, pages, ids)}
        if self.kernel is not None:
            slots = slots_of(shape, ids)
            works["writer"] = lambda: writer_again(shape, self.kernel, pages, ids, slots)
        return works

    def _against_copy(self, works: dict[str, Work], num_bytes: int) -> dict[str, Timing]:
        source = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)

        def copy() -> None:
            target.copy_(source)

        def ahead() -> None:
            for _ in range(max(1, 2_000_000_000 // num_bytes)):
                copy()

        return interleaved({"copy": copy, **works}, self.repeat, ahead)

    def _add(
        self,
        section: str,
        name: str,
        who: str,
        placement: Placement,
        ids_kind: Ids,
        reverse: bool,
        num_bytes: int,
        timing: Timing,
        copy: Timing,
        right: bool,
        tuning: dict[str, Any] | None = None,
    ) -> None:
        row = {
            "section": section,
            "name": name,
            "who": who,
            "placement": placement,
            "ids": ids_kind,
            "direction": "shuffle -> standard" if reverse else "standard -> shuffle",
            "bytes": num_bytes,
            "timing": timing.asdict(),
            "copy": copy.asdict(),
            "terabytes_per_s": 2 * num_bytes / timing.median_us / 1e6,
            "of_copy": copy.median_us / timing.median_us,
            "right": right,
            "tuning": tuning,
        }
        self.figures["rows"].append(row)
        self.progress(
            f"  {name} {who} {placement} {ids_kind} {timing.median_us:.1f} us, "
            f"{row['of_copy']:.3f} of the copy {tuning or ''}"
        )


def _find_writer(source: Path | None) -> tuple[Any, str]:
    try:
        return load_kernel(writer_source(source)), ""
    except MissingDependencyError as error:
        return None, f"not measured: {error}"
