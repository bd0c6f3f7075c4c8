"""The main job in real vLLM: ``kvpd demo --vllm``, which is ``make demo``.

Prefill on standard pages, decode on shuffled pages, an OS process each, real NIXL, CPU only.
First vLLM's own connector, then kvpd's. Exits 0 only if all of kvpd's tokens and bytes are right;
that stock is wrong is shown, and it is said if it should ever be right.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from tests.vllm.checks import kvpd_pair, page_shape, warnings_about_pages
from tests.vllm.client import ENGINE, EngineError, EngineOptions, EngineProcess, zygote
from tests.vllm.model import LAYERS, ModelShape, build_model
from tests.vllm.pair import DECODE_TOKENS, HandOver, Pair, pair_options, prompts, stock_transfer

SHAPE = ModelShape(kv_heads=2, head_dim=64)
BLOCK = 16
BLOCKS = 6
PROMPTS = 4
CONVERTED = ": convert: "


@dataclass(frozen=True)
class Arm:
    """What one connector made of the prompts.

    Attributes:
        tokens: of each prompt.
        right_pages: pages that the decoder holds as it should, all layers.
        said: what the decoder logged about the pair.
        metrics: the decoder's.
    """

    tokens: list[list[int]]
    right_pages: int
    said: str
    metrics: dict[str, float]


def main() -> int:
    """Run both connectors and compare; the exit code."""
    console = Console(highlight=False, soft_wrap=not sys.stdout.isatty())
    try:
        with tempfile.TemporaryDirectory() as name:
            return show(console, Path(name))
    except EngineError as error:
        console.print(str(error), markup=False)
        return 2


def show(console: Console, directory: Path) -> int:
    """Run everything with its files in `directory`, and say what came out."""
    batch = prompts(PROMPTS, blocks=BLOCKS, block_size=BLOCK)
    with step(console, "a tiny Qwen3 model with seeded weights; vLLM is imported once"):
        model = build_model(directory, SHAPE)
        zygote(ENGINE)
    with step(console, "one engine alone: the tokens that are right"):
        expected = _alone(model, batch, directory)
    with step(console, "vLLM's own connector: standard prefill, shuffled decoder"):
        stock = _stock(model, batch, directory)
    with step(console, "kvpd's connector: the same pair"):
        ours = _kvpd(model, batch, directory)
    # From the prompts, not from what arrived: what did not arrive is not right.
    num_pages = LAYERS * sum(-(-len(prompt) // BLOCK) for prompt in batch)
    console.print(_table(expected, {"vLLM": stock, "kvpd": ours}, num_pages))
    console.print(f"\nkvpd's verdict: {ours.said}")
    _say_times(console, ours.metrics)
    if _num_right(stock.tokens, expected):
        console.print("[yellow]stock has right answers: the pair does not show the defect here[/]")
    holds = ours.tokens == expected and ours.right_pages == num_pages
    console.print(
        "[green]kvpd: every token and every byte is right[/]"
        if holds
        else "[red]kvpd: NOT every token and every byte is right[/]"
    )
    return 0 if holds else 1


@contextmanager
def step(console: Console, text: str) -> Iterator[None]:
    """Say what is being done, and how long it took."""
    start = time.monotonic()
    with console.status(text):
        yield
    console.print(f"{time.monotonic() - start:5.1f} s  {text}", markup=False)


def _alone(model: Path, batch: Sequence[Sequence[int]], directory: Path) -> list[list[int]]:
    with EngineProcess("alone", EngineOptions(model, "shuffled"), directory) as engine:
        requests: list[dict[str, Any]] = [
            {"id": str(index), "prompt": list(prompt), "max_tokens": DECODE_TOKENS}
            for index, prompt in enumerate(batch)
        ]
        done = engine.run(requests)
    return [done[request["id"]]["tokens"] for request in requests]


def _stock(model: Path, batch: Sequence[Sequence[int]], directory: Path) -> Arm:
    options = pair_options(
        model, "standard", "shuffled", stock_transfer("kv_producer"), stock_transfer("kv_consumer")
    )
    with Pair(*options, directory) as pair:
        _ = pair.decode.facts  # waits until it is up
        already_said = len(pair.decode.log)
        arm = _hand_over(pair, batch, directory)
        said = warnings_about_pages(pair.decode.log[already_said:])
    return Arm(arm.tokens, arm.right_pages, "\n".join(said) or "nothing", arm.metrics)


def _kvpd(model: Path, batch: Sequence[Sequence[int]], directory: Path) -> Arm:
    with kvpd_pair(model, directory) as pair:
        arm = _hand_over(pair, batch, directory)
        said = [line for line in pair.decode.log.splitlines() if CONVERTED in line]
    verdict = said[0].partition(": ")[2] if said else "none was logged"
    return Arm(arm.tokens, arm.right_pages, verdict, arm.metrics)


def _hand_over(pair: Pair, batch: Sequence[Sequence[int]], directory: Path) -> Arm:
    requests = pair.prefill_only(batch)
    source = pair.prefill.pages(directory)
    result = pair.decode_only(requests)
    return Arm(
        list(result.tokens.values()),
        _num_right_pages(result, source),
        "",
        pair.decode.call("metrics"),
    )


def _num_right_pages(result: HandOver, source: NDArray[np.uint8]) -> int:
    right = 0
    for name, local in result.requested_blocks.items():
        wanted = page_shape(SHAPE, BLOCK).shuffle(source[:, result.remote_blocks[name]])
        got = result.received_pages[name][:, local]
        right += int((got == wanted).all(axis=-1).sum())
    return right


def _num_right(tokens: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> int:
    return sum(a == b for a, b in zip(tokens, expected, strict=True))


def _table(expected: Sequence[Sequence[int]], arms: dict[str, Arm], num_pages: int) -> Table:
    table = Table(title=f"{len(expected)} prompts, {DECODE_TOKENS} tokens each")
    for heading in ("connector", "right answers", "right pages", "tokens of the first prompt"):
        table.add_column(heading)
    table.add_row("none: one engine", "the reference", "", str(expected[0]))
    for name, arm in arms.items():
        right = f"{_num_right(arm.tokens, expected)} of {len(expected)}"
        table.add_row(name, right, f"{arm.right_pages} of {num_pages}", str(arm.tokens[0]))
    said = arms["vLLM"].said
    table.caption = f"vLLM's connector warned of: {said}"
    return table


def _say_times(console: Console, metrics: dict[str, float]) -> None:
    """What the decoder's own metrics say, a request on average."""
    converted = max(1, int(metrics["vllm:kvpd_convert_seconds_count"]))
    seconds = {
        what: metrics[f"vllm:kvpd_{what}_seconds_sum"] / converted for what in ("read", "convert")
    }
    console.print(
        f"a request: transfer {1e3 * seconds['read']:.1f} ms, conversion "
        f"{1e3 * seconds['convert']:.1f} ms (on a CPU, in one thread)"
    )


if __name__ == "__main__":
    sys.exit(main())
