"""The parts that are programs of their own: the checks of bytes and the conversion bench."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tests.vllm.client import ROOT

Status = Literal["passed", "failed", "not run"]
ACCURACY = "accuracy of 1P1D"
DIRECT = "direct placement"
NO_DIRECT = (
    "kvpd offers direct placement on CUDA only: mapping a peer's memory is not built for HIP"
)
TAIL_CHARACTERS = 8000
NO_TESTS_RAN = 5  # pytest's exit status


@dataclass
class Part:
    """One part of the report.

    Attributes:
        why: why it was not run or what failed; "" if it passed.
        details: whatever else helps.
    """

    name: str
    status: Status
    why: str = ""
    details: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """As it is written; what it says of itself comes first."""
        return {"name": self.name, "status": self.status, "why": self.why, **self.details}


def byte_checks(machine: dict[str, Any]) -> Part:
    """The kernels on this GPU against writers that share no code with kvpd."""
    if machine["why_no_gpu"]:
        return Part("byte checks", "not run", machine["why_no_gpu"])
    return _gpu_checks("byte checks", "tests/gpu/check_convert.py")


def direct_checks(machine: dict[str, Any]) -> Part:
    """Pages read out of another process's memory by the conversion itself.

    Not on an AMD GPU, where nothing of it is built; the part is there to say so.
    """
    if machine.get("hip") is not None:
        return Part(DIRECT, "not run", NO_DIRECT)
    if not machine["devices"]:
        return Part(DIRECT, "not run", machine["why_no_gpu"])
    return _gpu_checks(DIRECT, "tests/gpu/check_direct.py")


def _gpu_checks(name: str, path: str) -> Part:
    command = [sys.executable, "-m", "pytest", "-m", "gpu", path]
    done = _run(command)
    counts = re.findall(r"\d+ (?:passed|failed|errors?|skipped)", done.stdout)
    details = {
        "command": command[1:],
        "counts": counts,
        "output_tail": done.stdout[-TAIL_CHARACTERS:],
    }
    if done.returncode == NO_TESTS_RAN:
        return Part(name, "not run", "pytest ran no check; see output_tail", details)
    if done.returncode:
        return Part(name, "failed", f"pytest ended with {done.returncode}", details)
    return Part(name, "passed", "", details)


def conversion_bench(machine: dict[str, Any], directory: Path) -> Part:
    """Time of the conversion against a copy; it compares every page before it times anything.

    Where vLLM is installed that includes its own AITER cache writer, run on this GPU.
    """
    name = "conversion bench"
    if machine["why_no_gpu"]:
        return Part(name, "not run", machine["why_no_gpu"])
    figures = directory / "bench.json"
    command = [sys.executable, "-m", "kvpd.cli", "bench", "convert", "--json", str(figures)]
    done = _run(command)
    details: dict[str, Any] = {
        "command": [*command[1:-1], "FILE"],
        "output_tail": (done.stdout + done.stderr)[-TAIL_CHARACTERS:],
    }
    if figures.is_file():
        details["figures"] = json.loads(figures.read_text())
    if done.returncode:
        return Part(name, "failed", f"the bench ended with {done.returncode}", details)
    return Part(name, "passed", "", details)


def accuracy_run(
    machine: dict[str, Any], directory: Path, model: str | None, block_size: int, is_cpu_bed: bool
) -> Part:
    """1P1D with shuffled pages on the decoder only; see `tests.amd.accuracy`."""
    if machine["why_no_gpu"] and not is_cpu_bed:
        return Part(ACCURACY, "not run", machine["why_no_gpu"])
    if importlib.util.find_spec("vllm") is None:
        return Part(ACCURACY, "not run", "vllm is not installed")
    # Needs torch and more, which is why it is not imported before.
    from tests.amd.accuracy import Machine, accuracy

    return accuracy(Machine(model, block_size, len(machine["devices"]), is_cpu_bed), directory)


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=ROOT, env=os.environ.copy(), capture_output=True, text=True, check=False
    )
