"""Fused writers in real vLLM on a GPU: python -m tests.gpu.fused --json FILE

Two models of Qwen3-8B's KV geometry, 36 layers: one with QK norm, one without (Llama). For each,
three engines with shuffled pages (backend.py), torch.compile and full graphs: as vLLM compiles by
default; with the fusion pass on and a backend that answers no hook, so that vLLM's kernels run one
after the other; and with kvpd's writers. They start together and are timed one after the other.

Exits 0 only if every layer's pattern was replaced with kvpd's writers and none without, and if both
give the same tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from tests.gpu.bed import FULL, GPU_ENVIRONMENT
from tests.vllm.client import BASE_ENVIRONMENT, ROOT
from tests.vllm.model import ModelSize, build_model

LAYERS = 36
BACKENDS = {
    "default": "tests.gpu.backend.ShuffledTritonBackend",
    "separate": "tests.gpu.backend.ShuffledTritonBackend",
    "fused": "tests.gpu.backend.FusedShuffledTritonBackend",
}
FUSIONS = {"llama": "fuse_rope_kvcache", "qwen3": "fuse_qk_norm_rope_kvcache"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all engines; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.fused", description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="where the result goes")
    parser.add_argument("--logs", type=Path, required=True, help="directory of the engines' logs")
    parser.add_argument("--models", nargs="+", choices=list(FUSIONS), default=list(FUSIONS))
    options = parser.parse_args(arguments)
    options.logs.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        engines = {}
        for model in options.models:
            size = ModelSize(LAYERS, 1024, 8192, has_qk_norm=model == "qwen3")
            path = build_model(Path(name), FULL.shape, size)
            for arm in BACKENDS:
                place = Path(name) / f"{model}-{arm}"
                engines[model, arm] = _start(model, arm, path, place, options.logs)
        for key, engine in engines.items():
            result.setdefault(key[0], {})[key[1]] = _answer(engine)
        for (model, arm), engine in engines.items():
            if engine.poll() is None and engine.stdin is not None:
                engine.stdin.write("time\n")
                engine.stdin.flush()
                result[model][arm] |= _answer(engine)
                engine.wait(60)
    faults = [fault for model, arms in result.items() for fault in _faults(model, arms)]
    options.json.write_text(json.dumps(result | {"faults": faults}) + "\n")
    for model, arms in result.items():
        for arm, found in arms.items():
            print(f"{model:6} {arm:9} {_line(found)}")
    print("\n".join(faults) or "as it has to be")
    return 1 if faults else 0


def _start(model: str, arm: str, path: Path, place: Path, logs: Path) -> subprocess.Popen[str]:
    place.mkdir()
    switches = {
        "model": str(path),
        "backend": BACKENDS[arm],
        "fusions": [] if arm == "default" else [FUSIONS[model]],
        # The order of a norm's additions is the kernel's own: both sides have to have it.
        "has_norm_kernel": arm != "default",
        "cache_bytes": FULL.cache_bytes,
    }
    environment = os.environ | BASE_ENVIRONMENT | GPU_ENVIRONMENT
    environment |= {
        "PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(ROOT)]),
        "VLLM_DISABLE_COMPILE_CACHE": "1",
        "VLLM_CACHE_ROOT": str(place / "vllm"),
        "TORCHINDUCTOR_CACHE_DIR": str(place / "inductor"),
        "TORCHINDUCTOR_COMPILE_THREADS": "2",
    }
    return subprocess.Popen(
        [sys.executable, "-m", "tests.gpu.fused_engine", json.dumps(switches)],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=(logs / f"{model}-{arm}.log").open("w"),
        text=True,
    )


def _answer(engine: subprocess.Popen[str]) -> dict[str, Any]:
    """The next result line of an engine; its end is a result too."""
    assert engine.stdout is not None
    for line in engine.stdout:
        if line.startswith("RESULT "):
            found: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
            return found
    return {"error": f"ended with {engine.wait()}"}


def _faults(model: str, arms: dict[str, Any]) -> list[str]:
    found = [f"{model}, {arm}: {got['error']}" for arm, got in arms.items() if "error" in got]
    if found:
        return found
    for arm, wanted in (("separate", 0), ("fused", LAYERS)):
        counts = [entry["replaced"] for entry in arms[arm]["replaced"]]
        if not counts or max(counts) != wanted:
            found.append(f"{model}, {arm}: {arms[arm]['replaced']} replaced, {wanted} expected")
    for key in ("alone", "together"):
        if arms["fused"][key] != arms["separate"][key]:
            found.append(f"{model}: tokens of requests {key} differ")
    return found


def _line(found: dict[str, Any]) -> str:
    if "graph_ms" not in found:
        return str(found)[:300]
    texts = []
    for name in ("graph_ms", "step_ms"):
        tenths = quantiles(found[name], n=10)
        texts.append(f"{name} {median(found[name]):.3f} ({tenths[0]:.3f}-{tenths[-1]:.3f})")
    counts = [entry["replaced"] for entry in found["replaced"]]
    return f"{', '.join(texts)}, replaced {counts}, {found['implementations']}"


if __name__ == "__main__":
    raise SystemExit(main())
