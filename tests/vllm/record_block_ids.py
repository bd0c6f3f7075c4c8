"""Record block ids of real engines under load: python -m tests.vllm.record_block_ids DIRECTORY

Stock vLLM on both sides, equal formats, CPU only. Requests of mixed lengths keep coming while
others decode; the first ones only age the block pools and are not kept. Of each request what the
decoder's connector is asked to read: local block i from remote block i. Only ids are real: how long
anything takes on a CPU changes which requests overlap, so a trace differs from run to run.
With `--report`, pages per run of the traces in DIRECTORY.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.vllm.model import VOCABULARY, ModelShape, build_model
from tests.vllm.pair import Pair, pair_options, stock_transfer

BLOCK_SIZE = 16
MAX_MODEL_TOKENS = 2048
SECONDS = 1800.0


@dataclass(frozen=True)
class Load:
    """One workload.

    Attributes:
        concurrency: requests that are prefilled or decoded at a time.
        prefix_caching: on both engines.
        num_requests: kept; `num_warm` more come before and are not.
        num_blocks: of each engine's pool.
    """

    concurrency: int
    prefix_caching: bool
    num_requests: int = 32
    num_warm: int = 64
    num_blocks: int = 1024

    @property
    def name(self) -> str:
        caching = "cached" if self.prefix_caching else "uncached"
        return f"{caching}-{self.concurrency}"


LOADS = tuple(Load(concurrency, caching) for caching in (False, True) for concurrency in (1, 8))


def prompts(load: Load) -> Iterator[tuple[list[int], int]]:
    """(prompt, tokens to generate), without end; half of the prompts share a beginning."""
    source = random.Random(7)

    def text(length: int) -> list[int]:
        return [source.randrange(VOCABULARY - 1) for _ in range(length)]

    beginnings = [text(source.randrange(100, 900)) for _ in range(6)]
    while True:
        length = min(int(source.lognormvariate(6.0, 0.9)) + 20, MAX_MODEL_TOKENS - 1000)
        beginning = source.choice(beginnings) if source.random() < 0.5 else []
        yield beginning + text(length), source.randrange(4, 96)


def record(load: Load, model: Path, directory: Path) -> dict[str, Any]:
    """Run one workload and return its trace."""
    options = pair_options(
        model,
        "standard",
        "standard",
        stock_transfer("kv_producer"),
        stock_transfer("kv_consumer"),
        num_blocks=load.num_blocks,
        max_model_len=MAX_MODEL_TOKENS,
        enable_prefix_caching=load.prefix_caching,
    )
    with Pair(*options, directory) as pair:
        version = pair.decode.facts["vllm"]
        order, remote = _run(pair, load)
        asked = pair.decode.call("evaluate", source="result = engine.requested")
    local = {}
    for name, blocks in asked.items():
        # vLLM appends a random suffix to the id it was given.
        local[name.rsplit("-", 1)[0]] = blocks
    requests = []
    for name in order[load.num_warm :]:
        ours, theirs = local.get(name, []), remote[name]
        # A prefix hit on the decoder is not read: the blocks at the end are.
        requests.append({"local": ours, "remote": theirs[len(theirs) - len(ours) :]})
    return {
        "engine": f"vLLM {version}, NixlConnector, CPU, blocks of {BLOCK_SIZE} tokens",
        "made_by": "python -m tests.vllm.record_block_ids",
        "load": asdict(load),
        "requests": requests,
    }


def _run(pair: Pair, load: Load) -> tuple[list[str], dict[str, list[int]]]:
    """Keep the engines busy; the ids of finished requests in order, and their remote blocks."""
    source = prompts(load)
    prefilling: dict[str, tuple[list[int], int]] = {}
    decoding: set[str] = set()
    finished: list[str] = []
    remote: dict[str, list[int]] = {}
    total, serial, give_up_at = load.num_warm + load.num_requests, 0, time.monotonic() + SECONDS
    while len(finished) < total:
        if time.monotonic() > give_up_at:
            raise TimeoutError(f"{len(finished)} of {total} requests after {SECONDS:.0f} s")
        while len(prefilling) + len(decoding) < load.concurrency and serial < total:
            name, (prompt, num_tokens) = f"request.{serial}", next(source)
            serial += 1
            prefilling[name] = (prompt, num_tokens)
            transfer: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
            pair.prefill.call("submit", requests=[_request(name, prompt, 1, transfer)])
        outputs = pair.prefill.call("results")["outputs"]
        for name in [name for name in prefilling if outputs.get(name, {}).get("finished")]:
            prompt, num_tokens = prefilling.pop(name)
            transfer = outputs[name]["kv_transfer_params"]
            remote[name] = transfer["remote_block_ids"][0]
            decoding.add(name)
            pair.decode.call("submit", requests=[_request(name, prompt, num_tokens, transfer)])
        outputs = pair.decode.call("results")["outputs"]
        for name in sorted(name for name in decoding if outputs.get(name, {}).get("finished")):
            decoding.remove(name)
            finished.append(name)
        time.sleep(0.005)
    return finished, remote


def _request(
    name: str, prompt: list[int], num_tokens: int, transfer: dict[str, Any]
) -> dict[str, Any]:
    return {
        "id": name,
        "prompt": prompt,
        "max_tokens": num_tokens,
        "kv_transfer_params": transfer,
    }


def report(path: Path) -> str:
    """Pages per run of a trace: on both sides, on each alone; and descriptors a layer.

    In the engine's order NIXL merges runs of both sides at once. Sorted by the prefill's ids, into
    a slab that is filled in that order, it merges runs of the prefill alone.
    """
    requests = [
        (np.array(entry["local"]), np.array(entry["remote"]))
        for entry in json.loads(path.read_text())["requests"]
        if entry["local"]
    ]
    blocks = sum(len(local) for local, _ in requests)

    def num_runs(*sides: NDArray[np.int64]) -> int:
        return 1 + int(np.any([np.diff(ids) != 1 for ids in sides], axis=0).sum())

    stock = sum(num_runs(local, remote) for local, remote in requests)
    ordered = [(pair[0][at], pair[1][at]) for pair in requests for at in [np.argsort(pair[1])]]
    joint = sum(num_runs(local, remote) for local, remote in ordered)
    prefill = sum(num_runs(np.sort(remote)) for _, remote in requests)
    decode = sum(num_runs(np.sort(local)) for local, _ in requests)
    return (
        f"{path.stem:12} {len(requests):3} requests {blocks:5} blocks; pages a run: engine's order "
        f"{blocks / stock:.2f}, sorted {blocks / joint:.2f}, prefill alone "
        f"{blocks / prefill:.2f}, decoder alone {blocks / decode:.2f}; descriptors a layer: stock "
        f"{stock}, staged {prefill}"
    )


def main(arguments: list[str]) -> int:
    """Write one file per load, or report on those there are; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.vllm.record_block_ids")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--loads", nargs="*", default=[load.name for load in LOADS])
    parser.add_argument("--report", action="store_true", help="record nothing")
    options = parser.parse_args(arguments)
    if options.report:
        for path in sorted(options.directory.glob("*.json")):
            print(report(path))
        return 0
    options.directory.mkdir(parents=True, exist_ok=True)
    for load in LOADS:
        if load.name not in options.loads:
            continue
        with tempfile.TemporaryDirectory() as scratch:
            model = build_model(Path(scratch), ModelShape())
            trace = record(load, model, Path(scratch))
        path = options.directory / f"{load.name}.json"
        path.write_text(json.dumps(trace, separators=(",", ":")) + "\n")
        print(report(path))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
