"""Compile the conversion kernels for GPUs that are not here and say what came out, as JSON.

Run as a process of its own, without ``TRITON_INTERPRET``:
``python -m tests.convert.compile_probe [--kernels FILE] [--only WORD]``. FILE replaces
``kvpd/convert/kernels.py``, for mutants. ``--spills`` looks at the kernels of all cases that tests
convert, and says what their threads' stacks take on NVIDIA GPUs.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvpd import PageFormat
from kvpd.convert.plan import IN_PLACE, OUT_OF_PLACE
from kvpd.convert.specialise import Specialisation, specialise

TARGETS = {
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}
# heads, tokens, head size, element type, V: a page in registers at once, in several tiles (odd
# heads), in parts that meet, and the smallest.
SHAPES = [
    (8, 16, 128, "bfloat16", "tiled"),
    (8, 16, 128, "bfloat16", "transposed"),
    (8, 16, 128, "float8_e4m3fn", "tiled"),
    (5, 16, 128, "bfloat16", "tiled"),
    (1, 16, 64, "float8_e4m3fn", "transposed"),
    (16, 32, 256, "bfloat16", "tiled"),
]
# One regular expression per kind of instruction, in the order of the text.
PTX = {
    "load16": r"ld\.global\S*\.v4\.b32",
    "load": r"ld\.global",
    "store16": r"st\.global\S*\.v4\.b32",
    "store": r"st\.global",
    "barrier": r"bar\.sync|barrier\.sync",
    "atomic": r"atom\.",
    "exchange": r"st\.shared",
}
AMDGCN = {
    "load16": r"(?:global|buffer|flat)_load_dwordx4",
    "load": r"(?:global|buffer|flat)_load_",
    "store16": r"(?:global|buffer|flat)_store_dwordx4",
    "store": r"(?:global|buffer|flat)_store_",
    "wait": r"s_waitcnt vmcnt\(0\)\s*$",
    "barrier": r"s_barrier",
    "atomic": r"(?:global|buffer|flat)_atomic_",
    "exchange": r"ds_write",
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kernels", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--spills", action="store_true")
    args = parser.parse_args()
    kernel = _kernel(args.kernels)
    facts = list(_stacks(kernel) if args.spills else _facts(kernel, args.only))
    json.dump({"triton": triton.__version__, "facts": facts}, sys.stdout)


def _kernel(path: Path | None) -> Any:
    if path is None:
        from kvpd.convert.kernels import convert_kernel

        return convert_kernel
    spec = importlib.util.spec_from_file_location("mutant_kernels", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.convert_kernel


def _facts(kernel: Any, only: str) -> Iterator[dict[str, Any]]:
    for heads, tokens, head_dim, dtype, v in SHAPES:
        shape: dict[str, Any] = {"heads": heads, "tokens": tokens, "head_dim": head_dim}
        variant: Any = v
        standard = PageFormat.standard(**shape, dtype=dtype)
        shuffled = PageFormat.aiter_shuffle(**shape, dtype=dtype, v=variant)
        pairs = {"forth": (standard, shuffled), "back": (shuffled, standard)}
        for direction, placement, chip in product(pairs, ("in-place", "staged"), TARGETS):
            name = f"H{heads}N{tokens}D{head_dim}-{dtype}-{v}-{direction}-{placement}-{chip}"
            if only in name:
                yield {
                    "name": name,
                    **_compile(kernel, *pairs[direction], placement, TARGETS[chip]),
                }


def _stacks(kernel: Any) -> Iterator[dict[str, Any]]:
    """Each kernel of a case, and the bytes that its stack takes."""
    from kvpd.convert.launch import _piece_bytes
    from tests.convert.cases import set_up
    from tests.convert.spills import every_case, kernel_name

    seen = set()
    for case in every_case():
        setup = set_up(replace(case, num_layers=1, num_blocks=3))
        source, target = setup.source, setup.target.pages
        chosen = specialise(
            source.format,
            target.format,
            IN_PLACE if case.in_place else OUT_OF_PLACE,
            in_place=case.in_place,
            source_piece_bytes=_piece_bytes(source, "source"),
            target_piece_bytes=_piece_bytes(target, "target"),
            hip=False,
        )
        key = (str(chosen.constants), chosen.num_warps, case.id_dtype)
        if key in seen:
            continue
        seen.add(key)
        ids = "*i64" if case.id_dtype == torch.int64 else "*i32"
        types, constants, aligned = _signature(kernel, chosen)
        types |= {"source_ids": ids, "target_ids": ids}
        compiled = triton.compile(
            ASTSource(kernel, types, constants, aligned),
            target=TARGETS["sm_90"],
            options={"num_warps": chosen.num_warps},
        )
        yield {
            "name": kernel_name(case),
            "stack_bytes": _nvidia_bytes(compiled.asm["ptx"], "stack frame"),
        }


def _compile(
    kernel: Any, source: PageFormat, target: PageFormat, placement: str, gpu: GPUTarget
) -> dict[str, Any]:
    in_place = placement == "in-place"
    half = source.page_bytes // 2
    chosen = specialise(
        source,
        target,
        IN_PLACE if in_place else OUT_OF_PLACE,
        in_place=in_place,
        source_piece_bytes=half if in_place else source.page_bytes,
        target_piece_bytes=half,
        hip=gpu.backend == "hip",
    )
    compiled = triton.compile(
        ASTSource(kernel, *_signature(kernel, chosen)),
        target=gpu,
        options={"num_warps": chosen.num_warps},
    )
    threads = chosen.num_warps * gpu.warp_size
    tiles = chosen.constants["PART_TILES"]
    hip = gpu.backend == "hip"
    text = compiled.asm["amdgcn" if hip else "ptx"]
    return {
        "in_place": in_place,
        "meets": in_place and chosen.num_parts > 1,
        "vectors_per_thread": tiles * chosen.plan.tile_bytes / 16 / threads,
        "shared": compiled.metadata.shared,
        "spills": _amd_spills(text) if hip else _nvidia_bytes(text, "spill"),
        "sequence": _sequence(text, AMDGCN if hip else PTX),
    }


def _signature(
    kernel: Any, chosen: Specialisation
) -> tuple[dict[str, str], dict[Any, Any], dict[Any, Any]]:
    types = {
        "source_table": "*i64",
        "target_table": "*i64",
        "source_ids": "*i32",
        "target_ids": "*i32",
        "counters": "*i32",
        "num_ids": "i32",
        "num_work": "i32",
        **dict.fromkeys(chosen.constants, "constexpr"),
    }
    position = {name: (kernel.arg_names.index(name),) for name in types}
    constants = {position[name]: value for name, value in chosen.constants.items()}
    # What the launch would find of the tables; of the ids it looks at nothing.
    aligned = {
        position[name]: [["tt.divisibility", 16]]
        for name in ("source_table", "target_table", "counters")
    }
    return types, constants, aligned


def _sequence(text: str, kinds: dict[str, str]) -> list[str]:
    patterns = {kind: re.compile(r"^\s*(?:@\S+\s+)?" + regex) for kind, regex in kinds.items()}
    found = []
    for line in text.splitlines():
        for kind, pattern in patterns.items():
            if pattern.match(line):
                found.append(kind)
                break
    return found


def _nvidia_bytes(ptx: str, what: str) -> int:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        command = [triton.knobs.nvidia.ptxas.path, "-v", "--gpu-name=sm_90a", str(path)]
        done = subprocess.run(
            [*command, "-o", str(path.with_suffix(".cubin"))],
            capture_output=True,
            text=True,
            check=True,
        )
    return sum(int(number) for number in re.findall(rf"(\d+) bytes {what}", done.stderr))


def _amd_spills(text: str) -> int:
    counts = re.findall(r"\.(?:vgpr|sgpr)_spill_count:\s*(\d+)", text)
    assert counts, "the assembly no longer says how much was spilled"
    return sum(int(number) for number in counts)


if __name__ == "__main__":
    main()
