"""The main job in real vLLM: python -m tests.vllm.demo

Prefill on standard pages, decode on shuffled pages, two OS processes each, real NIXL, CPU only.
First vLLM's own connector, then kvpd's. Exits 0 only if kvpd's tokens and pages are right; that
stock is wrong is shown, and it is said if it should ever be right.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from tests.vllm.checks import kvpd_pair, page_shape
from tests.vllm.client import EngineOptions, EngineProcess
from tests.vllm.model import LAYERS, ModelShape, build_model
from tests.vllm.pair import DECODE_TOKENS, HandOver, Pair, pair_options, prompts, stock_transfer

SHAPE = ModelShape(kv_heads=2, head_dim=64)
BLOCK = 16


def main() -> int:
    """Run both connectors and compare; the exit code."""
    console = Console()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        console.print("a tiny Qwen3 model with seeded weights, standard prefill, shuffled decoder")
        model = build_model(directory, SHAPE)
        batch = prompts(4, blocks=6, block_size=BLOCK)
        console.print("1/3  one engine alone: the tokens that are right")
        expected = _alone(model, batch, directory)
        console.print("2/3  vLLM's own connector")
        stock, stock_said = _stock(model, batch, directory)
        console.print("3/3  kvpd's connector")
        with kvpd_pair(model, directory) as pair:
            requests = pair.prefill_only(batch)
            source = pair.prefill.pages(directory)
            ours = pair.decode_only(requests)
            metrics = pair.decode.call("metrics")
            verdict = _verdict(pair)
    pages_right = _num_right_pages(ours, source)
    num_pages = sum(len(blocks) for blocks in ours.requested_blocks.values()) * LAYERS
    table = Table(title=f"{len(batch)} prompts, {DECODE_TOKENS} tokens each")
    for heading in ("connector", "right answers", "right pages", "said about the pair"):
        table.add_column(heading)
    right_of_stock = _num_right(stock, expected)
    table.add_row("vLLM NixlConnector", f"{right_of_stock} of {len(batch)}", "", stock_said)
    right = _num_right(ours, expected)
    table.add_row(
        "kvpd KvpdConnector", f"{right} of {len(batch)}", f"{pages_right} of {num_pages}", verdict
    )
    console.print(table)
    read, convert = (metrics[f"vllm:kvpd_{what}_seconds_sum"] for what in ("read", "convert"))
    console.print(f"transfer {1e3 * read:.1f} ms, conversion {1e3 * convert:.1f} ms, on a CPU")
    if right_of_stock == len(batch):
        console.print("[yellow]stock was right: the pair does not show the defect here[/]")
    return 0 if right == len(batch) and pages_right == num_pages else 1


def _alone(model: Path, batch: Sequence[Sequence[int]], directory: Path) -> list[list[int]]:
    with EngineProcess("alone", EngineOptions(model, "shuffled"), directory) as engine:
        requests = [
            {"id": str(index), "prompt": list(prompt), "max_tokens": DECODE_TOKENS}
            for index, prompt in enumerate(batch)
        ]
        return [entry["tokens"] for entry in engine.run(requests).values()]


def _stock(model: Path, batch: Sequence[Sequence[int]], directory: Path) -> tuple[HandOver, str]:
    options = pair_options(
        model, "standard", "shuffled", stock_transfer("kv_producer"), stock_transfer("kv_consumer")
    )
    with Pair(*options, directory) as pair:
        result = pair.hand_over(batch)
        said = [line for line in pair.decode.log.splitlines() if "NIXL transfer failure" in line]
        return result, said[0] if said else "nothing"


def _num_right(result: HandOver, expected: Sequence[Sequence[int]]) -> int:
    return sum(a == b for a, b in zip(result.tokens.values(), expected, strict=True))


def _num_right_pages(
    result: HandOver, source: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]
) -> int:
    right = 0
    for name, local in result.requested_blocks.items():
        wanted = page_shape(SHAPE, BLOCK).shuffle(source[:, result.remote_blocks[name]])
        got = result.received_pages[name][:, local]
        right += int((got == wanted).all(axis=-1).sum())
    return right


def _verdict(pair: Pair) -> str:
    lines = [line for line in pair.decode.log.splitlines() if ": convert: " in line]
    return lines[0].split(": convert: ")[1] if lines else "no verdict was logged"


if __name__ == "__main__":
    sys.exit(main())
