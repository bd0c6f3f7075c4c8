"""The receive pipeline between two GPUs: ``pytest -m gpu tests/gpu/check_receive.py``.

Real NIXL, real kernels, two agents in one process, the prefill's cache on one GPU and the decoder's
on another. Not collected otherwise: a machine without them must not report these as passed.
"""

from __future__ import annotations

import time
from typing import Any, Literal

import numpy as np
import pytest
import torch

import kvpd
from kvpd.nixl import Agent, MemoryRange
from kvpd.receive import Receiver
from kvpd.request import Outcome, Ready
from kvpd.wire import Handshake, decode, encode
from tests.oracle.pages import Spec, planes

pytestmark = pytest.mark.gpu

if torch.cuda.device_count() < 2:
    pytest.skip("FEWER THAN TWO GPUS: NOTHING WAS MOVED BETWEEN ANY", allow_module_level=True)

LAYERS = ["layers.0", "layers.1", "layers.2"]
BLOCKS = 300
POISON = 0xA5
SHAPES = [(8, 16, 128, "bfloat16"), (2, 32, 64, "float16"), (8, 32, 256, "bfloat16")]


def description(format: kvpd.PageFormat, layout: str, cache: torch.Tensor) -> Any:
    """One rank whose whole cache is the tensor."""
    regions = kvpd.cache_regions(
        format,
        layout,
        address=cache.data_ptr(),
        num_blocks=BLOCKS,
        layers=LAYERS,
        memory="vram",
        device=cache.device.index,
    )
    facts = kvpd.EngineFacts(
        model="random bytes",
        model_dtype="any",
        cache_dtype="auto",
        total_kv_heads=1,
        head_dim=1,
        block_size=1,
        layout=layout,
        backend="none",
        release="0",
        connector="1",
    )
    return kvpd.EngineDescription(facts, regions)


def run_to_end(receiver: Receiver) -> list[Outcome]:
    """Poll until nothing is live."""
    outcomes: list[Outcome] = []
    give_up_at = time.monotonic() + 60
    while receiver.num_live:
        assert time.monotonic() < give_up_at
        outcomes += receiver.poll()
    return outcomes + receiver.poll()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("placement", ["in_place", "staged"])
def test_pages_arrive_converted(
    placement: Literal["in_place", "staged"], shape: tuple[int, int, int, str]
) -> None:
    """Two requests at once, random ids, every byte of the decoder's cache compared."""
    heads, tokens, head_dim, dtype = shape
    extents: dict[str, Any] = {"heads": heads, "tokens": tokens, "head_dim": head_dim}
    standard = kvpd.PageFormat.standard(**extents, dtype=dtype)
    shuffled = kvpd.PageFormat.aiter_shuffle(**extents, dtype=dtype)
    num_bytes = len(LAYERS) * BLOCKS * standard.page_bytes
    rng = np.random.default_rng(5)
    sent = rng.integers(0, 256, num_bytes, dtype=np.uint8)
    source = torch.from_numpy(sent).to("cuda:0")
    target = torch.full((num_bytes,), POISON, dtype=torch.uint8, device="cuda:1")

    torch.cuda.set_device(0)
    prefill = Agent.create(f"prefill-{time.time_ns()}")
    offered = description(standard, "LBHNC", source)
    held = prefill.register([MemoryRange(source.data_ptr(), num_bytes, "vram", 0)])
    torch.cuda.set_device(1)
    decoder = Agent.create(f"decode-{time.time_ns()}")
    kept = decoder.register([MemoryRange(target.data_ptr(), num_bytes, "vram", 1)])
    handshake = decode(encode(Handshake("prefill", offered, prefill.metadata())))
    receiver = Receiver(
        decoder,
        description(shuffled, "LHBNC", target),
        [target],
        convert=True,
        placement=placement,
        slab_pages=64,
    )
    peer = receiver.add_peer(handshake)
    local, remote = rng.permutation(BLOCKS)[:128], rng.permutation(BLOCKS)[:128]
    for number, half in enumerate((slice(0, 64), slice(64, 128))):
        receiver.start(f"request {number}", peer, local[half], remote[half])
    outcomes = run_to_end(receiver)
    assert len(outcomes) == 2 and all(isinstance(outcome, Ready) for outcome in outcomes)
    for outcome in outcomes:
        if isinstance(outcome, Ready):
            descriptors = outcome.descriptors
            assert descriptors.counted == descriptors.merged
            seconds = outcome.timings
            print(placement, shape, descriptors, seconds)

    # The expected cache from the shapes alone: pages cut out of what was sent, reordered by numpy.
    spec = Spec("aiter-shuffle", "tiled", heads, tokens, head_dim, dtype)
    pages = sent.view(np.int16).reshape(len(LAYERS), BLOCKS, heads, tokens, 2, head_dim)
    expected = np.full(num_bytes // 2, POISON * 257, dtype=np.uint16).view(np.int16)
    cache = expected.reshape(len(LAYERS), 2, BLOCKS, -1)
    for layer in range(len(LAYERS)):
        for ours, theirs in zip(local, remote, strict=True):
            page = pages[layer, theirs]
            for plane, values in enumerate(planes(spec, page[:, :, 0], page[:, :, 1])):
                cache[layer, plane, ours] = values
    assert np.array_equal(target.cpu().numpy(), expected.view(np.uint8))

    receiver.close()
    decoder.deregister(kept)
    decoder.close()
    prefill.deregister(held)
    prefill.close()
