"""Who writes: kvpd's one kernel, and the separate ones of engines where they can be loaded."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kvpd.cli.convert_bench.writer import load_kernel, write_tokens, writer_source
from kvpd.cli.write_bench.aiter import AiterKernel
from kvpd.cli.write_bench.workloads import EPSILON, Workload
from kvpd.errors import MissingDependencyError
from kvpd.write import WriteTuning, prepare
from kvpd.write.prepare import Implementation

Work = Callable[[], None]
JOBS = ("write", "rope", "norm")


class Engines:
    """What of vLLM and AITER was found; `missing` says what was not, and why."""

    def __init__(self, writer: Path | None, aiter: Path | None) -> None:
        self.missing: dict[str, str] = {}
        self.writer: Any = None
        self.aiter: AiterKernel | None = None
        try:
            self.writer = load_kernel(writer_source(writer))
        except MissingDependencyError as error:
            self.missing["vLLM's shuffle writer"] = str(error)
        try:
            self.aiter = AiterKernel(aiter)
        except MissingDependencyError as error:
            self.missing["AITER's fused kernel"] = str(error)
        self.has_operators = _load_operators()
        if not self.has_operators:
            self.missing["vLLM's rotary_embedding and rms_norm"] = "no vllm with CUDA kernels"


def _load_operators() -> bool:
    """Whether vLLM's compiled operators are there. Its Python is not imported: it takes long."""
    # Its build for CPUs has one library per instruction set, of which only one may be loaded.
    spec = importlib.util.find_spec("vllm") if torch.cuda.is_available() else None
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        for library in sorted(Path(folder).glob("_C*.so")):
            if not _are_operators_loaded():
                torch.ops.load_library(library)  # type: ignore[no-untyped-call]
    return _are_operators_loaded()


def _are_operators_loaded() -> bool:
    return hasattr(torch.ops._C, "rotary_embedding") and hasattr(torch.ops._C, "rms_norm")


def kvpd(
    workload: Workload,
    job: str,
    tuning: WriteTuning | None = None,
    implementation: Implementation = "triton",
) -> Work:
    """kvpd's kernel in every layer."""
    options: dict[str, Any] = {"scales": workload.scales}
    if job != "write":
        options["rotation"] = workload.rotation
    if job == "norm":
        options["norm"] = workload.norm
    writers = [
        prepare(workload.pages, layer, implementation=implementation, tuning=tuning)
        for layer in range(workload.pages.num_layers)
    ]

    def work() -> None:
        for layer, write in zip(workload.layers, writers, strict=True):
            own: dict[str, Any] = {}
            if job != "write":
                own["query"] = layer.query
            if job == "norm":
                own |= {"query_out": layer.query_out, "key_out": layer.key_out}
            write(layer.key, layer.value, workload.slots, **options, **own)

    return work


def separate(workload: Workload, job: str, engines: Engines) -> Work | None:
    """vLLM's kernels one after the other in every layer; None if one is missing."""
    if engines.writer is None or workload.shape.family != "shuffled":
        return None
    if job != "write" and not engines.has_operators:
        return None
    planes = [workload.planes(layer) for layer in range(workload.pages.num_layers)]
    rotation, norm, tokens = workload.rotation, workload.norm, workload.shape.tokens

    def work() -> None:
        for layer, (key_plane, value_plane) in zip(workload.layers, planes, strict=True):
            query, key = layer.query, layer.key
            if job == "norm":
                torch.ops._C.rms_norm(layer.query_out, query, norm.query_weight, EPSILON)
                torch.ops._C.rms_norm(layer.key_out, key, norm.key_weight, EPSILON)
                query, key = layer.query_out, layer.key_out
            if job != "write":
                torch.ops._C.rotary_embedding(
                    rotation.positions, query, key, key.shape[-1], rotation.cos_sin, True
                )
            write_tokens(
                engines.writer, key, layer.value, key_plane, value_plane, workload.slots, tokens
            )

    return work


def aiter_fused(workload: Workload, job: str, engines: Engines) -> Work | None:
    """AITER's Triton kernel of RoPE and write, which knows transposed V; None if it is missing."""
    kernel = engines.aiter
    if kernel is None or job != "rope" or workload.shape.family != "transposed":
        return None
    planes = [workload.planes(layer) for layer in range(workload.pages.num_layers)]

    def work() -> None:
        for layer, (key_plane, value_plane) in zip(workload.layers, planes, strict=True):
            kernel(
                layer.query,
                layer.key,
                layer.value,
                key_plane,
                value_plane,
                workload.slots,
                workload.rotation,
                layer.query_out,
                layer.key_out,
                workload.shape.tokens,
            )

    return work
