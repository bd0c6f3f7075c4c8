"""One pair of engines: what has to be right, then what is timed."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from tests.gpu.arms import Arm
from tests.gpu.bed import BLOCK_TOKENS, Bed, Scale
from tests.gpu.latency import disturbance
from tests.vllm.client import EngineProcess
from tests.vllm.pair import decode, prefill, prompts

COMPARED_TOKENS = 16
REPORTED = (
    "vllm:kvpd_read_seconds_sum",
    "vllm:kvpd_convert_seconds_sum",
    "vllm:nixl_xfer_time_seconds_sum",
    "vllm:nixl_num_descriptors_sum",
)
_seeds = itertools.count(1000)
_names = itertools.count()


def fresh(count: int, blocks: int) -> list[list[int]]:
    """Prompts that nobody has seen: nothing of them is cached anywhere."""
    return [
        prompts(1, blocks=blocks, block_size=BLOCK_TOKENS, seed=next(_seeds))[0]
        for _ in range(count)
    ]


class Ends(Protocol):
    """Two engines, or those of `tests.vllm.pair.Pair`."""

    @property
    def prefill(self) -> EngineProcess:
        """The one that is read from."""

    @property
    def decode(self) -> EngineProcess:
        """The one that reads."""


def compared_prompts(scale: Scale, first_seed: int = 0) -> list[list[int]]:
    """One of each length, and one that begins like the longest; the same for the same seed."""
    own = [
        prompts(1, blocks=blocks, block_size=BLOCK_TOKENS, seed=seed)[0]
        for seed, blocks in enumerate(scale.blocks, first_seed)
    ]
    head = own[-1][: scale.shared_blocks * BLOCK_TOKENS]
    return [*own, head + prompts(1, blocks=2, block_size=BLOCK_TOKENS, seed=first_seed + 99)[0]]


def tokens_alone(engine: EngineProcess, batch: Sequence[Sequence[int]]) -> list[list[int]]:
    """Tokens of an engine that prefills and decodes by itself, one request at a time.

    Each prompt is run as a prefill first. The second run finds all of its blocks but the last
    token, as a decoder does that was handed them: both compute the same batches.
    """
    found = []
    for prompt in batch:
        _run_alone(engine, prompt, 1)
        found.append(_run_alone(engine, prompt, COMPARED_TOKENS)[1])
    return found


def tokens_from_pages_of(
    source: EngineProcess,
    engine: EngineProcess,
    batch: Sequence[Sequence[int]],
    directory: Path,
) -> list[list[int]]:
    """Tokens that `engine` computes from the pages that `source` makes of each prompt.

    As `tokens_alone`, with the source's bytes put into the engine's cached blocks between the two
    runs: what a decoder has to answer to another backend's pages, without any transfer.
    """
    found = []
    for prompt in batch:
        # The last block is not full, so it is not kept; the second run computes its one token.
        whole = slice(len(prompt) // BLOCK_TOKENS)
        theirs = source.call("blocks_of", name=_run_alone(source, prompt, 1)[0])[whole]
        ours = engine.call("blocks_of", name=_run_alone(engine, prompt, 1)[0])[whole]
        path = directory / f"pages-{next(_names)}.npy"
        source.call("dump", path=str(path), blocks=theirs)
        engine.call("load", path=str(path), blocks=ours)
        path.unlink()
        found.append(_run_alone(engine, prompt, COMPARED_TOKENS)[1])
    return found


def _run_alone(
    engine: EngineProcess, prompt: Sequence[int], max_tokens: int
) -> tuple[str, list[int]]:
    """(the request's name, its tokens)."""
    name = f"alone-{next(_names)}"
    done = engine.run([{"id": name, "prompt": list(prompt), "max_tokens": max_tokens}])
    return name, done[name]["tokens"]


def check(
    pair: Ends,
    arm: Arm,
    bed: Bed,
    expected: Sequence[Sequence[int]],
    directory: Path,
    first_seed: int = 0,
) -> dict[str, Any]:
    """Hand over one by one, then several at once; what came out right.

    `first_seed` is the prompts'; a decoder that has seen them already would have nothing to read.
    """
    requests = []
    for prompt, tokens in zip(compared_prompts(bed.scale, first_seed), expected, strict=True):
        (answer,) = _hand_over(pair, arm, bed, [prompt], directory)
        requests.append(answer | {"right_tokens": answer.pop("tokens") == tokens})
    batch = prompts(
        bed.scale.num_burst,
        blocks=bed.scale.blocks[-3],
        block_size=BLOCK_TOKENS,
        seed=first_seed + 77,
    )
    together = _hand_over(pair, arm, bed, batch, directory)
    for answer in together:
        del answer["tokens"]
    pair.decode.call("snapshot_received", directory=None)
    return {"one_by_one": requests, "together": together}


def _hand_over(
    pair: Ends, arm: Arm, bed: Bed, batch: Sequence[Sequence[int]], directory: Path
) -> list[dict[str, Any]]:
    """Hand prompts over at once; for each: tokens, and how many pages hold what they must.

    Pages are compared when they were reported received and have not been used yet: with the
    prefill's own bytes, as they are or shuffled by the oracle.
    """
    requests = prefill(pair.prefill, batch, COMPARED_TOKENS)
    with tempfile.TemporaryDirectory(dir=directory) as name:
        sources = [
            pair.prefill.pages(Path(name), request["kv_transfer_params"]["remote_block_ids"][0])
            for request in requests
        ]
        result = decode(pair.decode, requests, Path(name))
    answers = []
    for request, source in zip(requests, sources, strict=True):
        name = request["id"]
        received = result.requested_blocks[name]
        sent = source[:, source.shape[1] - len(received) :]
        wanted = bed.scale.page.shuffle(sent) if arm.converts else sent
        same = (result.received_pages[name] == wanted).all(axis=-1)
        answers.append(
            {
                "prompt_tokens": len(request["prompt"]),
                "hit_blocks": result.num_hit_blocks(name),
                "pages": int(same.size),
                "right_pages": int(np.count_nonzero(same)),
                "tokens": result.tokens[name],
            }
        )
    return answers


def churn(pair: Ends, scale: Scale) -> None:
    """Use the pools until free blocks are in the order that use leaves them in."""
    for _ in range(scale.num_churned):
        _timed_hand_over(pair, scale)


def hand_overs(pair: Ends, scale: Scale) -> list[dict[str, Any]]:
    """One by one, each to an idle decoder."""
    return [_timed_hand_over(pair, scale) for _ in range(scale.num_measured)]


def measure(pair: Ends, scale: Scale) -> dict[str, Any]:
    """Hand-overs one by one, arrivals beside a running request, and arrivals at once."""
    return {
        "hand_overs": hand_overs(pair, scale),
        "arrivals": [_arrivals(pair, scale, scale.spacing_tokens) for _ in range(scale.num_rounds)],
        "back_to_back": [_arrivals(pair, scale, 0) for _ in range(scale.num_rounds)],
        "burst_seconds": _burst(pair, scale),
        "main_stream_submits": pair.decode.call("main_stream_submits"),
    }


def _prefilled(pair: Ends, scale: Scale, count: int) -> list[dict[str, Any]]:
    return prefill(pair.prefill, fresh(count, scale.measured_blocks), 1)


def _timed_hand_over(pair: Ends, scale: Scale) -> dict[str, Any]:
    (request,) = _prefilled(pair, scale, 1)
    before = pair.decode.call("metrics")
    answer: dict[str, Any] = pair.decode.call("hand_over", request=request)
    after = pair.decode.call("metrics")
    grown = {name: value - before.get(name, 0.0) for name, value in after.items()}
    return answer | {"metrics": {name: grown[name] for name in REPORTED if name in grown}}


def _arrivals(pair: Ends, scale: Scale, spacing_tokens: int) -> dict[str, Any]:
    arrivals = _prefilled(pair, scale, scale.num_arrivals)
    victim = {
        "id": f"victim-{next(_names)}",
        "prompt": fresh(1, 3)[0],
        # Enough for every arrival's wait.
        "max_tokens": (spacing_tokens + 60) * (scale.num_arrivals + 1),
    }
    found = pair.decode.call(
        "decode_while_others_arrive",
        victim=victim,
        arrivals=arrivals,
        spacing_tokens=spacing_tokens,
    )
    num_served = sum("first_token" in event for event in found["events"])
    if num_served != scale.num_arrivals:
        raise RuntimeError(f"{num_served} of {scale.num_arrivals} arrivals had a token in time")
    return asdict(disturbance(found["stamps"], found["events"]))


def _burst(pair: Ends, scale: Scale) -> list[float]:
    requests = _prefilled(pair, scale, scale.num_burst)
    seconds: list[float] = pair.decode.call("first_tokens", arrivals=requests)
    return seconds
