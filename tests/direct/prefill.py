"""A prefill in a process of its own: ``python -m tests.direct.prefill``.

Its cache lies in several allocations of the fake driver, standard pages in poison. It prints its
handshake and then a number for each line it reads: ``mapped``, ``close SECONDS``, ``unchanged``,
``fork`` (the pid of a child that does nothing).
It loads no torch, so that it starts in a moment.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from kvpd import EngineDescription, PageFormat, Region, wire
from kvpd.direct import Exporter
from tests.convert.slot_writer import random_tokens, write_page
from tests.direct.fake_driver import FakeDriver, remove_left_by
from tests.engine_builder import facts
from tests.oracle.pages import Spec

STANDARD = Spec("standard", "HNC", 4, 16, 64, "bfloat16")
POISON = 0xA5


@dataclass(frozen=True)
class Shape:
    """A cache of `layers` layers, `layers_per_allocation` of them in one allocation."""

    layers: int = 4
    blocks: int = 9
    layers_per_allocation: int = 2
    gap_bytes: int = 4096
    spare_bytes: int = 8192

    def tokens(self, layer: int, block: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """k and v of [N, H, D] that this block holds, the same in every process."""
        return random_tokens(np.random.default_rng([layer, block]), STANDARD)


def build(shape: Shape, driver: FakeDriver) -> list[Region]:
    """Allocate and fill the cache."""
    page = PageFormat.standard(
        heads=STANDARD.heads, tokens=STANDARD.tokens, head_dim=STANDARD.head_dim, dtype="bfloat16"
    )
    layer_bytes = shape.blocks * page.page_bytes
    regions = []
    for first in range(0, shape.layers, shape.layers_per_allocation):
        layers = range(first, min(first + shape.layers_per_allocation, shape.layers))
        used = shape.gap_bytes + len(layers) * (layer_bytes + shape.gap_bytes)
        allocation = driver.allocate(used + shape.spare_bytes)
        memory = driver.bytes_of(allocation)
        memory.fill(POISON)
        at = shape.gap_bytes
        for layer in layers:
            for block in range(shape.blocks):
                raw = write_page(STANDARD, *shape.tokens(layer, block))
                memory[at + block * page.page_bytes :][: page.page_bytes] = raw
            regions.append(
                Region(
                    allocation.address + at,
                    shape.blocks,
                    page.page_bytes,
                    page.page_bytes,
                    format=page,
                    planes=[0],
                    layers=[f"layer.{layer}"],
                    memory="vram",
                )
            )
            at += layer_bytes + shape.gap_bytes
    return regions


def main() -> None:
    shape = Shape(**json.loads(sys.argv[1]))
    driver = FakeDriver()
    try:
        regions = build(shape, driver)
        before = _digest(driver)
        with Exporter(regions, driver=driver) as exporter:
            description = EngineDescription(facts(), regions)
            handshake = wire.Handshake("prefill", description, direct=exporter.part)
            serve(handshake, exporter, unchanged=lambda: _digest(driver) == before)
    finally:
        driver.free()


def serve(handshake: wire.Handshake, exporter: Exporter, **commands: Callable[[], int]) -> None:
    """Publish the handshake, then answer commands until there are no more."""
    _say(b64encode(wire.encode(handshake)).decode())
    for line in sys.stdin:
        match line.split():
            case ["fork"]:
                _say(os.fork() or _sleep_for_ever())
            case ["mapped"]:
                _say(exporter.num_mapped)
            case ["close", seconds]:
                _say(exporter.close(timeout_seconds=float(seconds)))
            case [name]:
                _say(int(commands[name]()))


def _sleep_for_ever() -> NoReturn:
    while True:
        time.sleep(60)


def _digest(driver: FakeDriver) -> str:
    return hashlib.sha256(b"".join(bytes(driver.memory[base]) for base in driver.names)).hexdigest()


def _say(what: object) -> None:
    print(what, flush=True)


@dataclass
class Prefill:
    """The process, as a test holds it."""

    process: subprocess.Popen[str]
    handshake: wire.Handshake

    def tell(self, line: str) -> None:
        """A command whose answer is read later."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def answer(self) -> int:
        """What it says to the oldest command without an answer."""
        assert self.process.stdout is not None
        return int(self.process.stdout.readline())

    def ask(self, line: str) -> int:
        """One command and its answer."""
        self.tell(line)
        return self.answer()

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.process.kill()
        self.process.wait()


@contextmanager
def running(shape: Any, module: str = __name__, **environment: str) -> Iterator[Prefill]:
    """A prefill process that has made its offer, of a cache of `shape` (a dataclass)."""
    process = subprocess.Popen(
        [sys.executable, "-m", module, json.dumps(asdict(shape))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
        env={**os.environ, **environment},
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        handshake = wire.decode(b64decode(process.stdout.readline()))
        assert handshake is not None
        yield Prefill(process, handshake)
    finally:
        process.stdin.close()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
        process.stdout.close()
        process.wait()
        remove_left_by(process.pid)


if __name__ == "__main__":
    main()
