"""Everything that has to be run on an AMD GPU, in one command, with one file as its result.

    make amd-report            # which is: python -m tests.amd --out amd-report.json

Needs what the machine has already: PyTorch for ROCm, vLLM, AITER, NIXL or RIXL. What cannot be run
is in the file with the reason.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from tests.amd.machine import describe_machine
from tests.amd.parts import (
    ACCURACY,
    DIRECT,
    Part,
    accuracy_run,
    byte_checks,
    conversion_bench,
    direct_checks,
)


def main(argv: list[str] | None = None) -> int:
    """Run all parts and write the file.

    Returns:
        0 if every part passed, 1 if one failed, 2 if none failed but some were not run.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.amd", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="written as JSON")
    parser.add_argument(
        "--model",
        help="for the accuracy run; a tiny Qwen3 with random weights, 8 KV heads of 128, if none",
    )
    parser.add_argument("--block-size", type=int, default=16, choices=(16, 32))
    parser.add_argument(
        "--cpu-bed",
        action="store_true",
        help="try the accuracy run itself, with the CPU test bed in place of AITER",
    )
    args = parser.parse_args(argv)
    machine = describe_machine()
    report: dict[str, object] = {
        "report": 1,
        "machine": machine,
        "parts": [],
    }
    parts: list[Part] = []
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        for title, run in (
            ("byte checks", lambda: byte_checks(machine)),
            (DIRECT, lambda: direct_checks(machine)),
            ("conversion bench", lambda: conversion_bench(machine, directory)),
            (
                ACCURACY,
                lambda: accuracy_run(machine, directory, args.model, args.block_size, args.cpu_bed),
            ),
        ):
            print(f"{title} ...", flush=True)
            part = run()
            parts.append(part)
            print(f"    {part.status}{': ' + part.why if part.why else ''}", flush=True)
            # After each part: a run that is cut short still says what it did.
            report["parts"] = [part.as_json() for part in parts]
            args.out.write_text(json.dumps(report, indent=1) + "\n")
    print(f"written to {args.out}; please send this file")
    statuses = {part.status for part in parts}
    if "failed" in statuses:
        return 1
    return 2 if "not run" in statuses else 0


if __name__ == "__main__":
    sys.exit(main())
