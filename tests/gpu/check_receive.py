"""The receive pipeline on GPUs: ``pytest -m gpu -s tests/gpu/check_receive.py``.

Real NIXL, real kernels, real CUDA IPC. The prefill is another process, on another GPU where there
is one; on one GPU all bytes are checked just so, and times are of no link. Not collected otherwise.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import pytest
import torch

from kvpd import slab_bytes
from kvpd.nixl import Agent, MemoryRange
from kvpd.peer import Peer
from kvpd.receive import Receiver
from kvpd.request import Outcome, Ready
from tests.direct.cuda_decoder import CudaDecoder
from tests.direct.cuda_prefill import CudaShape
from tests.direct.prefill import Prefill, running

pytestmark = pytest.mark.gpu

if not torch.cuda.is_available():
    pytest.skip("NO GPU: NOTHING WAS MOVED TO ONE", allow_module_level=True)

NUM_GPUS = torch.cuda.device_count()
if NUM_GPUS == 1:
    # UCX would take the detour over the host between two processes on one GPU.
    os.environ.setdefault("UCX_CUDA_IPC_ENABLE_GET_ZCOPY", "on")
OURS = torch.device("cuda", 0)
SHAPE = CudaShape(layers=12, blocks=300, nixl=True, device=min(1, NUM_GPUS - 1))
OTHER_SHAPES = [
    replace(SHAPE, heads=2, tokens=32, head_dim=64),
    replace(SHAPE, layers=4, tokens=32, head_dim=256, layers_per_allocation=1),
]
MODULE = "tests.direct.cuda_prefill"

Ids = Literal["consecutive", "reversed", "random"]


@dataclass(frozen=True)
class Arm:
    """One way for pages to come."""

    placement: Literal["in_place", "staged", "direct"]
    converts: bool

    def __str__(self) -> str:
        return f"{self.placement}-{'converted' if self.converts else 'equal'}"


ARMS = [
    Arm("in_place", True),
    Arm("staged", True),
    Arm("direct", True),
    Arm("in_place", False),
    Arm("direct", False),
]


@pytest.fixture(scope="module")
def agent() -> Iterator[Agent]:
    torch.cuda.set_device(OURS)
    made = Agent.create(f"check-decode-{time.time_ns()}")
    yield made
    made.close()


@pytest.fixture(scope="module")
def prefill() -> Iterator[Prefill]:
    with running(SHAPE, MODULE) as process:
        yield process


class Decoder:
    """A receiver over a poisoned cache, and its requests."""

    def __init__(self, agent: Agent, prefill: Prefill, shape: CudaShape, arm: Arm) -> None:
        self.cache = CudaDecoder(shape, OURS, converts=arm.converts)
        regions = self.cache.description.regions
        self.agent = agent
        self._registration = agent.register([MemoryRange.of(region) for region in regions])
        options: dict[str, Any] = {}
        if arm.placement == "staged":
            # Far less than a request, in five slots: chunks of it overlap and take turns.
            options = {"slab_bytes": slab_bytes(regions, num_pages=30), "num_slots": 5}
        self.receiver = Receiver(
            agent,
            self.cache.description,
            [self.cache.memory],
            convert=arm.converts,
            direct=arm.placement == "direct",
            placement="staged" if arm.placement == "staged" else "in_place",
            **options,
        )
        self.peer: Peer = self.receiver.add_peer(
            prefill.handshake, must_be_direct=arm.placement == "direct"
        )

    def start(self, name: str, theirs: Any, ours: Any, **more: Any) -> None:
        self.receiver.start(name, self.peer, ours, theirs, **more)

    def run(self, timeout_seconds: float = 60) -> list[Outcome]:
        """Poll until every request has ended."""
        outcomes: list[Outcome] = []
        give_up_at = time.monotonic() + timeout_seconds
        while self.receiver.num_live:
            assert time.monotonic() < give_up_at, "requests that never end"
            outcomes += self.receiver.poll()
        return outcomes + self.receiver.poll()

    def close(self) -> None:
        self.receiver.close()
        self.agent.deregister(self._registration)


def id_pairs(kind: Ids, count: int, num_blocks: int) -> tuple[Any, Any]:
    """(theirs, ours): int32 [count], distinct; the runs of the two sides differ."""
    rng = np.random.default_rng(5)
    if kind == "random":
        theirs, ours = (rng.permutation(num_blocks)[:count].astype(np.int32) for _ in range(2))
        return theirs, ours
    theirs = np.arange(7, 7 + count, dtype=np.int32)
    ours = np.arange(num_blocks - count - 3, num_blocks - 3, dtype=np.int32)
    return (theirs, ours) if kind == "consecutive" else (theirs[::-1], ours[::-1])


def on_gpu(ids: Any) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(ids)).to(OURS)


def serve(agent: Agent, prefill: Prefill, shape: CudaShape, arm: Arm, kind: Ids) -> list[Outcome]:
    """Four requests in flight together; every byte of the cache is compared."""
    came = prefill.ask("notices")
    decoder = Decoder(agent, prefill, shape, arm)
    theirs, ours = id_pairs(kind, 230, shape.blocks)
    parts = {"a": slice(0, 120), "b": slice(120, 121), "c": slice(121, 190), "d": slice(190, 230)}
    for name, part in parts.items():
        decoder.start(name, theirs[part], ours[part])
    outcomes = decoder.run()
    assert sorted(outcome.request_id for outcome in outcomes) == list(parts)
    for outcome in outcomes:
        assert isinstance(outcome, Ready), outcome
        assert (outcome.placement, outcome.is_converted) == (arm.placement, arm.converts)
        assert outcome.notice_error == ""
        if arm.placement == "direct":
            assert outcome.descriptors.planned == 0
        else:
            assert outcome.descriptors.counted == outcome.descriptors.merged
    decoder.cache.expect(on_gpu(theirs), on_gpu(ours))
    assert decoder.cache.holds()
    give_up_at = time.monotonic() + 20
    while prefill.ask("notices") < came + len(parts):
        assert time.monotonic() < give_up_at, "release notices that never came"
        time.sleep(0.01)
    decoder.close()
    assert prefill.ask("unchanged") == 1
    return outcomes


@pytest.mark.parametrize("kind", ["consecutive", "reversed", "random"])
@pytest.mark.parametrize("arm", ARMS, ids=str)
def test_every_byte(agent: Agent, prefill: Prefill, arm: Arm, kind: Ids) -> None:
    outcomes = serve(agent, prefill, SHAPE, arm, kind)
    first = next(outcome for outcome in outcomes if outcome.request_id == "a")
    assert isinstance(first, Ready)
    print(f"\n{arm} {kind}: 120 blocks, {first.descriptors.counted} descriptors, {first.timings}")


@pytest.mark.parametrize("shape", OTHER_SHAPES, ids=["H2 N32 D64", "H8 N32 D256"])
def test_other_shapes(agent: Agent, shape: CudaShape) -> None:
    with running(shape, MODULE) as process:
        for arm in ARMS:
            serve(agent, process, shape, arm, "random")


@pytest.mark.parametrize("arm", ARMS, ids=str)
def test_a_prefill_killed_while_it_is_read(agent: Agent, arm: Arm) -> None:
    """What is ready is right, what failed is said, and no other byte has changed."""
    with running(SHAPE, MODULE) as process:
        decoder = Decoder(agent, process, SHAPE, arm)
        theirs, ours = id_pairs("random", 290, SHAPE.blocks)
        before, during, after = slice(0, 60), slice(60, 230), slice(230, 290)
        decoder.start("before", theirs[before], ours[before])
        assert [type(outcome) for outcome in decoder.run()] == [Ready]
        decoder.cache.expect(on_gpu(theirs[before]), on_gpu(ours[before]))
        deadline = time.monotonic() + 15
        decoder.start("during", theirs[during], ours[during], deadline=deadline)
        process.kill()
        (outcome,) = decoder.run()
        if isinstance(outcome, Ready):
            decoder.cache.expect(on_gpu(theirs[during]), on_gpu(ours[during]))
        else:
            assert sorted(outcome.invalid_blocks) == sorted(ours[during].tolist())
            decoder.cache.ignore(on_gpu(ours[during]))
        print(f"\n{arm}, killed while it is read: {outcome}"[:300])
        assert decoder.cache.holds()
        if arm.placement == "direct":
            with pytest.raises(RuntimeError):
                decoder.start("after", theirs[after], ours[after])
        else:
            decoder.start("after", theirs[after], ours[after], deadline=time.monotonic() + 15)
            (outcome,) = decoder.run()
            print(f"{arm}, begun after the kill: {outcome}"[:300])
            if isinstance(outcome, Ready):
                decoder.cache.expect(on_gpu(theirs[after]), on_gpu(ours[after]))
            else:
                decoder.cache.ignore(on_gpu(ours[after]))
        assert decoder.cache.holds()
        decoder.close()
