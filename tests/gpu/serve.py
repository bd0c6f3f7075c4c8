"""Real vLLM, one prefill and one decoder, on GPUs: python -m tests.gpu.serve --json FILE

Needs vLLM, NIXL and kvpd in the interpreter named by KVPD_VLLM_PYTHON (default: this one) and two
GPUs. On one GPU everything that has to be right is checked as well; a READ is then a copy in its
memory and says nothing about a link. With --gpus 0 a tiny model runs on the CPU, to try the script.

The prefill keeps vLLM's standard pages (TRITON_ATTN), the decoder shuffled ones (backend.py). For
each arm (arms.py): tokens of requests handed over one by one against an engine that prefills and
decodes by itself, pages against the prefill's own bytes, then times. Exits 0 only if every arm was
as it has to be: the stock connector on different formats has to be wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from tests.gpu.arms import ARMS, Arm
from tests.gpu.bed import FULL, TINY, Bed
from tests.gpu.measure import check, churn, compared_prompts, measure, tokens_alone
from tests.gpu.report import text
from tests.gpu.verdict import arm_faults, read_protocols
from tests.vllm.client import EngineError, EngineProcess
from tests.vllm.model import build_model
from tests.vllm.pair import Pair

_begun = time.monotonic()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the arms; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.serve", description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="where the result goes")
    parser.add_argument("--gpus", type=int, choices=(0, 1, 2), default=2)
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--logs", type=Path, help="keep the engines' logs in this directory")
    parser.add_argument(
        "--together",
        action="store_true",
        help="keep all arms running and time them in turns; an engine takes 8 GB of its GPU",
    )
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name, ExitStack() as engines:
        directory = Path(name)
        logs: Path = options.logs or directory / "logs"
        scale = FULL if options.gpus else TINY
        say("writing the model")
        bed = Bed(options.gpus, scale, build_model(directory, scale.shape, scale.model))
        result = run(bed, options.arms, engines, directory, logs, options.together)
    options.json.write_text(json.dumps(result) + "\n")
    print(text(result))
    return 1 if result["faults"] else 0


def run(
    bed: Bed,
    names: Sequence[str],
    engines: ExitStack,
    directory: Path,
    logs: Path,
    together: bool,
) -> dict[str, Any]:
    """Everything, as one JSON object; `faults` says in words what was not as it has to be."""

    def start(name: str) -> Pair:
        place = logs / name.replace(", ", "-").replace(" ", "-")
        place.mkdir(parents=True, exist_ok=True)
        pair = Pair(*bed.sides(ARMS[name]), place)
        engines.push(pair)
        return pair

    logs.mkdir(parents=True, exist_ok=True)
    alone = {
        backend: engines.enter_context(EngineProcess(f"alone-{backend}", bed.alone(backend), logs))
        for backend in ("standard", "shuffled")
    }
    groups = [list(names)] if together else [[name] for name in names]
    pairs = {name: start(name) for name in groups[0]} if together else {}
    result: dict[str, Any] = {"num_gpus": bed.num_gpus, "arms": {}, "faults": []}
    faults: list[str] = result["faults"]
    tokens = {}
    for backend, engine in alone.items():
        say(f"alone, {backend} pages")
        _expect_implementation(engine, bed, backend)
        tokens[backend] = tokens_alone(engine, compared_prompts(bed.scale))
    result["vllm"] = alone["shuffled"].facts["vllm"]
    result["device"] = alone["shuffled"].call("device")
    for engine in alone.values():
        engine.close()
    result["shuffled_equals_standard"] = tokens["shuffled"] == tokens["standard"]
    if not result["shuffled_equals_standard"]:
        faults.append("alone, shuffled and standard pages give different tokens")
    for group in groups:
        pairs = pairs or {name: start(name) for name in group}
        found = _run_arms(pairs, bed, tokens, directory)
        result["arms"] |= found
        for name, pair in pairs.items():
            pair.close()
            faults += [f"{name}: {fault}" for fault in arm_faults(ARMS[name], found[name], bed)]
        pairs = {}
    return result


def _run_arms(
    pairs: dict[str, Pair], bed: Bed, tokens: dict[str, list[list[int]]], directory: Path
) -> dict[str, Any]:
    """Check each arm, then time them in turns: what changes with time changes for all of them."""
    found: dict[str, Any] = {name: {} for name in pairs}

    def attempt(what: str, name: str, step: Callable[[], dict[str, Any]]) -> None:
        if "error" in found[name]:
            return
        say(f"{what}: {name}")
        try:
            found[name] |= step()
        except (EngineError, RuntimeError) as error:
            say(str(error))
            found[name]["error"] = str(error)

    for name, pair in pairs.items():
        expected = tokens[ARMS[name].decode.backend]
        attempt("check", name, partial(_check_arm, pair, ARMS[name], bed, expected, directory))
    timed = {name: pair for name, pair in pairs.items() if ARMS[name].is_right}
    for name, pair in timed.items():
        attempt("churn", name, partial(_churn_arm, pair, bed))
    for _ in range(bed.scale.num_passes):
        for name, pair in timed.items():
            passes = found[name].get("measured", [])
            attempt("time", name, partial(_time_arm, pair, bed, passes))
    return found


def _check_arm(
    pair: Pair, arm: Arm, bed: Bed, expected: Sequence[Sequence[int]], directory: Path
) -> dict[str, Any]:
    _expect_implementation(pair.prefill, bed, arm.prefill.backend)
    _expect_implementation(pair.decode, bed, arm.decode.backend)
    checked = check(pair, arm, bed, expected, directory)
    log = pair.decode.log
    return {
        "prefill": pair.prefill.facts,
        "decode": pair.decode.facts,
        "checked": checked,
        "read_protocols": read_protocols(log),
        "said": [line for line in log.splitlines() if "NIXL transfer failure" in line],
    }


def _churn_arm(pair: Pair, bed: Bed) -> dict[str, Any]:
    churn(pair, bed.scale)
    return {}


def _time_arm(pair: Pair, bed: Bed, passes: list[dict[str, Any]]) -> dict[str, Any]:
    return {"measured": [*passes, measure(pair, bed.scale)]}


def _expect_implementation(engine: EngineProcess, bed: Bed, backend: str) -> None:
    """Else another backend's pages would be tested."""
    wanted = [bed.implementation(backend)]
    if engine.facts["implementations"] != wanted:
        raise EngineError(f"{engine.name} runs {engine.facts['implementations']}, not {wanted}")


def say(what: str) -> None:
    """Progress, for whoever waits."""
    print(f"{time.monotonic() - _begun:7.1f} s  {what}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
