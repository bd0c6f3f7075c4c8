"""Compile the write kernel for GPUs that are not here and say what came out, as JSON.

Run as a process of its own, without ``TRITON_INTERPRET``:
``python -m tests.write.compile_probe [--kernels FILE] [--only WORDS]``. FILE replaces
``kvpd/write/kernels.py``, for mutants; WORDS are beginnings of names, comma separated.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import triton
from triton.compiler import ASTSource

from kvpd import PageFormat
from kvpd.write.launch import tuning_for
from kvpd.write.plan import Work, WritePlan, plan_write
from tests.convert.compile_probe import (
    AMDGCN,
    PTX,
    TARGETS,
    _nvidia_bytes,
    _sequence,
)

SHAPE: dict[str, Any] = {"heads": 8, "tokens": 16, "head_dim": 128}
FORMATS = {
    "shuffled": PageFormat.aiter_shuffle(**SHAPE, dtype="bfloat16"),
    "shuffled-fp8": PageFormat.aiter_shuffle(**SHAPE, dtype="float8_e4m3fn"),
    "packed": PageFormat.standard(**SHAPE, dtype="bfloat16"),
}
WORKS = {
    "write": Work(0, "bfloat16"),
    "rope": Work(32, "bfloat16", rotary_dim=128, is_in_place=True),
    "gptj": Work(32, "bfloat16", rotary_dim=64, is_neox=False, is_in_place=True),
    "norm": Work(32, "bfloat16", rotary_dim=128, has_norm=True),
}
ROWS = {"few": 1, "some": 128, "many": 2048}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kernels", type=Path)
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    kernel = _kernel(args.kernels)
    facts = list(_facts(kernel, args.only))
    json.dump({"triton": triton.__version__, "facts": facts}, sys.stdout)


def _kernel(path: Path | None) -> Any:
    if path is None:
        from kvpd.write.kernels import write_kernel

        return write_kernel
    spec = importlib.util.spec_from_file_location("mutant_write_kernels", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.write_kernel


def _facts(kernel: Any, only: str) -> Iterator[dict[str, Any]]:
    for format, work, rows, chip in product(FORMATS, WORKS, ROWS, TARGETS):
        name = f"{format}-{work}-{rows}-{chip}"
        if name.startswith(tuple(only.split(","))):
            element_bytes = FORMATS[format].components[0].element_bytes
            hip = TARGETS[chip].backend == "hip"
            tuning = tuning_for(ROWS[rows], element_bytes, hip=hip)
            plan = plan_write(FORMATS[format], WORKS[work], tuning)
            yield {"name": name, **_compile(kernel, plan, tuning.num_warps, chip)}


def _compile(kernel: Any, plan: WritePlan, num_warps: int, chip: str) -> dict[str, Any]:
    gpu = TARGETS[chip]
    hip = gpu.backend == "hip"
    compiled = triton.compile(
        ASTSource(kernel, *_signature(kernel, plan, hip)),
        target=gpu,
        options={"num_warps": num_warps},
    )
    text = compiled.asm["amdgcn" if hip else "ptx"]
    rotates = plan.has_rotation
    return {
        "in_place": rotates and plan.is_in_place,
        # Halves of Q and of K, and V; Q and K themselves, and K's page.
        "wide_loads": (4 if rotates else 1) + 1,
        "wide_stores": 6 if rotates and plan.cache_dtype == plan.dtype else 1,
        "shared": compiled.metadata.shared,
        "spills": _vector_spills(text) if hip else _nvidia_bytes(text, "spill"),
        "sequence": _sequence(text, AMDGCN if hip else PTX),
    }


def _vector_spills(text: str) -> int:
    """Spilled vector registers; scalar ones are kept in lanes of those, not in memory."""
    counts = re.findall(r"\.vgpr_spill_count:\s*(\d+)", text)
    assert counts, "the assembly no longer says how much was spilled"
    return sum(int(number) for number in counts)


def _signature(
    kernel: Any, plan: WritePlan, hip: bool
) -> tuple[dict[str, str], dict[Any, Any], dict[Any, Any]]:
    floats = ("query", "key", "value", "key_out", "cos_sin", "query_weight", "key_weight")
    types: dict[str, str] = dict.fromkeys(floats, "*bf16")
    types |= {"query_out": "*bf16", "positions": "*i64", "slots": "*i64", "epsilon": "fp32"}
    types |= dict.fromkeys(("query_scale", "key_scale", "value_scale"), "*fp32")
    types |= dict.fromkeys(("num_rows", "num_slots"), "i32")
    types |= dict.fromkeys(("PLAN", "HIP"), "constexpr")
    types = {name: types.get(name, "i64") for name in kernel.arg_names}
    position = {name: (kernel.arg_names.index(name),) for name in types}
    return types, {position["PLAN"]: plan, position["HIP"]: hip}, {}


if __name__ == "__main__":
    main()
