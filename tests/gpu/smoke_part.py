"""What the smoke's parts with engines have in common: arguments, result, and checking one pair."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from tests.gpu.arms import Arm
from tests.gpu.bed import SMOKE, TINY, Bed
from tests.gpu.measure import Ends, check, churn, hand_overs
from tests.gpu.verdict import arm_faults, read_protocols
from tests.vllm import client
from tests.vllm.client import EngineError, EngineOptions, EngineProcess
from tests.vllm.model import build_model

ENGINE = "tests.gpu.engine"


@dataclass(frozen=True)
class Joined:
    """Two engines that other pairs may share."""

    prefill: EngineProcess
    decode: EngineProcess


@dataclass
class Run:
    """One part while it runs.

    Attributes:
        path: where the result goes, after each pair, so that one that is killed says what it did.
    """

    bed: Bed
    path: Path
    directory: Path
    logs: Path
    engines: ExitStack
    result: dict[str, Any] = field(
        default_factory=lambda: {"faults": [], "is_complete": False, "arms": {}}
    )

    def start(self, name: str, options: EngineOptions) -> EngineProcess:
        """Begin to start an engine; its first call waits for it."""
        return self.engines.enter_context(EngineProcess(name, options, self.logs))

    def write(self) -> None:
        """Keep what is known."""
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(self.result))
        partial.replace(self.path)

    def expect(self, engine: EngineProcess, backend: str) -> None:
        """Else another backend's pages would be tested."""
        wanted = [self.bed.implementation(backend)]
        if engine.facts["implementations"] != wanted:
            raise EngineError(f"{engine.name} runs {engine.facts['implementations']}, not {wanted}")

    def try_arm(
        self,
        name: str,
        arm: Arm,
        pair: Ends,
        expected: Sequence[Sequence[int]],
        first_seed: int = 0,
    ) -> dict[str, Any]:
        """Tokens and bytes of one pair, then which placement its longest requests take."""
        bed = self.bed
        try:
            found: dict[str, Any] = {
                "checked": check(pair, arm, bed, expected, self.directory, first_seed),
                "layouts": [engine.facts["layout"] for engine in (pair.prefill, pair.decode)],
            }
            churn(pair, bed.scale)
            rows = hand_overs(pair, bed.scale)
            found["measured"] = [{"hand_overs": rows, "main_stream_submits": 0}]
            log = pair.decode.log
            found["read_protocols"] = read_protocols(log)
            found["said"] = [line for line in log.splitlines() if "NIXL transfer failure" in line]
            # One GPU is no link: these show that a placement was taken, and are no measurement.
            found["hand_over_ms"] = [round(1e3 * row["hand_over_seconds"], 2) for row in rows]
        except (EngineError, RuntimeError, ValueError) as error:
            found = {"error": str(error)}
        self.result["arms"][name] = found
        self.result["faults"] += [f"{name}: {fault}" for fault in arm_faults(arm, found, bed)]
        self.write()
        print(name, self.result["faults"], flush=True)
        return found


def main(run: Callable[[Run], None], arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a part; the exit status says whether it came to its end, the file what was found."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--gpus", type=int, choices=(0, 1), default=1)
    parser.add_argument("--logs", type=Path, required=True)
    options = parser.parse_args(arguments)
    options.logs.mkdir(parents=True, exist_ok=True)
    status = 1
    with tempfile.TemporaryDirectory() as name, ExitStack() as engines:
        scale = SMOKE if options.gpus else TINY
        bed = Bed(options.gpus, scale, build_model(Path(name), scale.shape, scale.model))
        part = Run(bed, options.json, Path(name), options.logs, engines)
        part.write()
        try:
            _preload()
            run(part)
            part.result["is_complete"] = True
            status = 0
        except (EngineError, RuntimeError) as error:
            traceback.print_exc()
            part.result["faults"].append(str(error).partition("\n")[0])
        part.write()
    sys.stdout.flush()
    os._exit(status)


def _preload() -> None:
    try:
        client.zygote(ENGINE)
    except EngineError as error:
        # Then every engine imports vLLM for itself, which is slower and as right.
        print(f"vLLM cannot be imported before engines are forked: {error}", file=sys.stderr)
        client.PRELOADED.pop(ENGINE, None)
