"""Direct placement on GPUs: ``pytest -m gpu -s tests/gpu/check_direct.py``.

The prefill is another process, on another GPU where there is one. On one GPU all bytes are checked
just so, but the times printed are of memory, not of a link. Not collected otherwise.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kvpd import Region
from kvpd.convert import DIRECT, ConversionQueue, Pages, Tuning, prepare
from kvpd.convert.plan import OUT_OF_PLACE
from kvpd.direct import DirectError, Exporter, Mapping, map_peer
from kvpd.direct.driver import BLOCK_BYTES, load_driver
from tests.direct.cuda_decoder import CudaDecoder
from tests.direct.cuda_prefill import CudaShape
from tests.direct.prefill import Prefill, running
from tests.waiting import eventually

pytestmark = pytest.mark.gpu

if not torch.cuda.is_available():
    pytest.skip("NO GPU: NOTHING WAS MAPPED ON ONE", allow_module_level=True)

NUM_GPUS = torch.cuda.device_count()
OURS = torch.device("cuda", 0)
SHAPE = CudaShape(device=NUM_GPUS - 1 and 1)
MODULE = "tests.direct.cuda_prefill"


@pytest.fixture(scope="module")
def prefill() -> Iterator[Prefill]:
    with running(SHAPE, MODULE) as process:
        yield process


def map_it(prefill: Prefill, **changes: Any) -> Mapping:
    handshake = prefill.handshake
    arguments: dict[str, Any] = {"part": handshake.direct, "device": OURS.index}
    arguments["regions"] = handshake.description.regions
    return map_peer(**{**arguments, **changes})


def source_of(mapping: Mapping, shape: CudaShape = SHAPE) -> Pages:
    return Pages.of(shape.formats()[0], mapping.regions, mapping.storages)


def permuted(seed: int, num_blocks: int = SHAPE.blocks) -> torch.Tensor:
    ids = np.random.default_rng(seed).permutation(num_blocks).astype(np.int32)
    return torch.from_numpy(ids).to(OURS)


@pytest.mark.parametrize("tuning", [DIRECT, OUT_OF_PLACE], ids=["direct", "one program a page"])
@pytest.mark.parametrize("convert", [True, False], ids=["converted", "equal"])
def test_bytes(prefill: Prefill, convert: bool, tuning: Tuning) -> None:
    """Requests of 1, 36 and 255 blocks with random ids; the whole cache is compared each time."""
    decoder = CudaDecoder(SHAPE, OURS, converts=convert)
    theirs, ours = permuted(1), permuted(2)
    with map_it(prefill) as mapping:
        conversion = prepare(source_of(mapping), decoder.pages, tuning=tuning)
        for part in (slice(0, 1), slice(1, 37), slice(37, 292)):
            conversion(theirs[part], ours[part])
            decoder.expect(theirs[part], ours[part])
            assert decoder.holds()
    assert eventually(lambda: prefill.ask("mapped") == 0)
    assert prefill.ask("unchanged") == 1


def test_an_allocation_for_each_layer() -> None:
    shape = CudaShape(layers_per_allocation=1, blocks=200, device=SHAPE.device)
    decoder = CudaDecoder(shape, OURS, converts=True)
    theirs, ours = permuted(3, 200), permuted(4, 200)
    with running(shape, MODULE) as process:
        began = time.perf_counter()
        mapping = map_it(process)
        print(f"\n36 allocations mapped in {(time.perf_counter() - began) * 1e3:.1f} ms")
        assert len(mapping.storages) == 36
        prepare(source_of(mapping, shape), decoder.pages, tuning=DIRECT)(theirs, ours)
        decoder.expect(theirs, ours)
        assert decoder.holds()
        mapping.close()
        assert eventually(lambda: process.ask("mapped") == 0)
        assert process.ask("unchanged") == 1


@pytest.mark.skipif(NUM_GPUS < 2, reason="ONE GPU: NO PREFILL WITH ANOTHER VIEW OF THE DEVICES")
def test_a_prefill_that_sees_only_its_own_gpu() -> None:
    shape = CudaShape(layers=4, device=0)
    decoder = CudaDecoder(shape, OURS, converts=True)
    theirs, ours = permuted(3), permuted(4)
    with running(shape, MODULE, CUDA_VISIBLE_DEVICES="1") as process, map_it(process) as mapping:
        prepare(source_of(mapping, shape), decoder.pages, tuning=DIRECT)(theirs, ours)
        decoder.expect(theirs, ours)
        assert decoder.holds()


def outlive(shape: CudaShape, decoder: CudaDecoder) -> None:
    """Kill a prefill whose pages are mapped, read them all the same, unmap."""
    theirs, ours = permuted(5, shape.blocks)[:500], permuted(6, shape.blocks)[:500]
    with running(shape, MODULE) as process:
        mapping = map_it(process)
        conversion = prepare(source_of(mapping, shape), decoder.pages, tuning=DIRECT)
        process.kill()
        assert eventually(lambda: not mapping.is_offered())
        time.sleep(0.5)
        conversion(theirs, ours)
        decoder.expect(theirs, ours)
        assert decoder.holds()
        with pytest.raises(DirectError) as caught:
            map_it(process)
        assert caught.value.code == "unreachable"
        del conversion
        mapped_bytes = sum(storage.numel() for storage in mapping.storages)
        free_before = torch.cuda.mem_get_info(shape.device)[0]
        mapping.close()
        freed_bytes = torch.cuda.mem_get_info(shape.device)[0] - free_before
        assert freed_bytes >= 0.9 * mapped_bytes


def test_a_killed_prefill_and_another_one() -> None:
    """Its memory stays taken and readable until we unmap; the next one maps as usual."""
    shape = CudaShape(layers=12, blocks=1000, device=SHAPE.device)
    for _ in range(2):
        outlive(shape, CudaDecoder(shape, OURS, converts=True))


def test_a_withdrawn_offer() -> None:
    shape = CudaShape(layers=2, device=SHAPE.device)
    with running(shape, MODULE) as process:
        mapping = map_it(process)
        assert process.ask("close 0.1") == 1
        assert not mapping.is_offered()
        mapping.close()
    mapping.close()


def test_extents_are_the_drivers(prefill: Prefill) -> None:
    """A region may end where the mapping ends, and not 16 bytes later."""
    regions = prefill.handshake.description.regions
    with map_it(prefill) as mapping:
        (storage,) = mapping.storages
        base = regions[0].address - (mapping.regions[0].address - storage.data_ptr())
        num_bytes = storage.numel()
    needed = SHAPE.gap_bytes + SHAPE.layers * (SHAPE.blocks * SHAPE.page_bytes + SHAPE.gap_bytes)
    # torch rounds what it takes from the driver to 2 MiB, and so far the mapping must reach.
    assert num_bytes == -(-needed // BLOCK_BYTES) * BLOCK_BYTES

    def region(address: int, blocks: int = 1) -> Region:
        page = SHAPE.formats()[0]
        size = page.page_bytes
        return Region(address, blocks, size, size, format=page, planes=[0], memory="vram")

    last = base + num_bytes - SHAPE.page_bytes
    with map_it(prefill, regions=[region(last)]) as mapping:
        # The very last page of the mapping is there to be read.
        assert int(mapping.storages[0][-1]) >= 0
        assert mapping.regions[0].address + SHAPE.page_bytes == (
            mapping.storages[0].data_ptr() + num_bytes
        )
    for hostile in (region(last + 16), region(last, 2), region(last + (1 << 40)), region(16)):
        with pytest.raises(DirectError) as caught:
            map_it(prefill, regions=[hostile])
        assert caught.value.code == "outside-mapping"
    assert eventually(lambda: prefill.ask("mapped") == 0)


def vram(address: int, num_bytes: int) -> Region:
    return Region(address, 1, num_bytes, num_bytes, memory="vram", device=OURS.index)


def refused(regions: list[Region]) -> str:
    with pytest.raises(DirectError) as caught:
        Exporter(regions)
    return caught.value.code


def test_what_is_not_offered() -> None:
    memory = torch.zeros(32 << 20, dtype=torch.uint8, device=OURS)
    exporter = Exporter([vram(memory.data_ptr() + 5, 1 << 20)])
    with pytest.raises(DirectError) as caught:
        map_peer(exporter.part, [vram(memory.data_ptr(), 16)], OURS.index)
    assert caught.value.code == "same-process"
    assert exporter.close() == 0
    host = torch.zeros(4096, dtype=torch.uint8, pin_memory=True)
    assert refused([vram(host.data_ptr(), 16)]) in ("driver", "not-exportable", "other-device")
    assert refused([vram(np.zeros(4096).ctypes.data, 16)]) == "driver"
    assert refused([vram(memory.data_ptr() + (16 << 20), 1 << 30)]) == "outside-allocation"


def test_a_small_allocation_would_share_its_block() -> None:
    """Straight from cudaMalloc: the driver puts it in a block with others."""
    runtime = pytest.importorskip("cuda.bindings.runtime")
    torch.cuda.init()
    status, address = runtime.cudaMalloc(65536)
    assert int(status) == 0
    assert refused([vram(int(address), 65536)]) == "shared-block"
    runtime.cudaFree(address)


EXPANDABLE = """
import torch
from kvpd import Region
from kvpd.direct import DirectError, Exporter
memory = torch.zeros(64 << 20, dtype=torch.uint8, device="cuda:0")
try:
    Exporter([Region(memory.data_ptr(), 1, 4096, 4096, memory="vram")])
except DirectError as error:
    print(error.code)
"""


def test_expandable_segments_have_no_handle() -> None:
    setting = "expandable_segments:True"
    environment = {"PYTORCH_CUDA_ALLOC_CONF": setting, "PYTORCH_ALLOC_CONF": setting}
    done = subprocess.run(
        [sys.executable, "-c", EXPANDABLE],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )
    assert done.stdout.strip() == "not-exportable", done.stderr


def test_the_driver_knows_the_devices() -> None:
    driver = load_driver()
    for device in range(NUM_GPUS):
        uuid = driver.device_uuid(device)
        assert uuid == f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        assert driver.find_device(uuid) == device
        assert driver.can_access_peer(device, device)


def test_one_mapping_through_the_queue(prefill: Prefill) -> None:
    """Side stream, pinned ids, completions: as the receiver runs it."""
    decoder = CudaDecoder(SHAPE, OURS, converts=True)
    theirs, ours = permuted(8), permuted(9)
    with map_it(prefill) as mapping:
        conversion = prepare(source_of(mapping), decoder.pages, tuning=DIRECT)
        conversion.warm_up()
        queue = ConversionQueue(OURS, num_slots=4, max_ids=16)
        completions = [
            queue.submit(
                conversion,
                theirs[first : first + 30].cpu().numpy(),
                ours[first : first + 30].cpu().numpy(),
            )
            for first in range(0, 270, 30)
        ]
        assert eventually(lambda: all(completion.done() for completion in completions))
        decoder.expect(theirs[:270], ours[:270])
        assert decoder.holds()


TUNINGS = {
    "DIRECT": DIRECT,
    "24 programs": replace(DIRECT, num_programs=24),
    "64 programs": replace(DIRECT, num_programs=64),
    "a program for each part (OUT_OF_PLACE)": OUT_OF_PLACE,
}


def median_seconds(run: Callable[[], None], repeats: int = 9) -> float:
    """GPU time of a call, by events; each after one that warms it."""
    times: list[float] = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e-3)
    return sorted(times)[len(times) // 2]


def test_times(prefill: Prefill) -> None:
    """Printed, not judged."""
    place = "OVER THE LINK OF TWO GPUS" if NUM_GPUS > 1 else "ON ONE GPU, NO LINK MEASUREMENT"
    print(f"\n{place}: {torch.cuda.get_device_name(OURS)}")
    began = time.perf_counter()
    mapping = map_it(prefill)
    print(f"mapped one allocation in {(time.perf_counter() - began) * 1e3:.1f} ms")
    source, ids_in, ids_out = source_of(mapping), permuted(1)[:256], permuted(2)[:256]
    num_bytes = 256 * SHAPE.layers * SHAPE.page_bytes
    for convert in (True, False):
        decoder = CudaDecoder(SHAPE, OURS, converts=convert)
        for name, tuning in TUNINGS.items():
            conversion = prepare(source, decoder.pages, tuning=tuning)
            conversion(ids_in, ids_out)
            seconds = median_seconds(lambda run=conversion: run(ids_in, ids_out))  # type: ignore[misc]
            what = "converted" if convert else "equal"
            print(
                f"{what:9} {name:50} {seconds * 1e3:7.3f} ms {num_bytes / seconds / 1e9:7.1f} GB/s"
            )
        conversion = prepare(source, decoder.pages, tuning=DIRECT)
        conversion.warm_up()
        queue = ConversionQueue(OURS)
        walls = []
        for block in range(200):
            theirs, ours = (np.array([(block * step) % 300], np.int32) for step in (7, 11))
            began = time.perf_counter()
            completion = queue.submit(conversion, theirs, ours)
            while not completion.done():
                pass
            walls.append((time.perf_counter() - began) * 1e6)
        walls = sorted(walls[50:])
        print(
            f"one block x {SHAPE.layers} layers, submit to done: median "
            f"{walls[len(walls) // 2]:.0f} us, 9 of 10 within {walls[len(walls) * 9 // 10]:.0f} us"
        )
    mapping.close()
