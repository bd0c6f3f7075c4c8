"""A decoder here maps the cache of a prefill in another process and converts from it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any, Literal

import msgspec
import numpy as np
import pytest
import torch

from kvpd import Region
from kvpd.convert import DIRECT, Pages, prepare
from kvpd.direct import DirectError, Mapping, map_peer
from tests.convert import interpreter  # noqa: F401 - before anything imports the kernels
from tests.convert.caches import Cache, make_cache, page_format
from tests.convert.slot_writer import write_page
from tests.direct.fake_driver import UUIDS, FakeDriver
from tests.direct.prefill import STANDARD, Prefill, Shape, running
from tests.oracle.pages import Spec
from tests.waiting import eventually

SHAPE = Shape()
SHUFFLED = Spec("aiter-shuffle", "tiled", 4, 16, 64, "bfloat16")


@pytest.fixture
def prefill() -> Iterator[Prefill]:
    with running(SHAPE) as process:
        yield process
        process.kill()


def map_it(prefill: Prefill, driver: FakeDriver | None = None, **changes: Any) -> Mapping:
    handshake = prefill.handshake
    assert handshake.direct is not None
    arguments: dict[str, Any] = {"part": handshake.direct, "device": 0}
    arguments["regions"] = handshake.description.regions
    arguments["driver"] = FakeDriver() if driver is None else driver
    return map_peer(**{**arguments, **changes})


def own_cache(spec: Spec, layers: int, blocks: int = 12) -> Cache:
    return make_cache(
        np.random.default_rng(1),
        page_format(spec),
        holding="planes" if spec is SHUFFLED else "joint",
        num_layers=layers,
        num_blocks=blocks,
        gap_bytes=48,
    )


@pytest.mark.parametrize("target", [SHUFFLED, STANDARD], ids=["converted", "equal"])
@pytest.mark.parametrize("implementation", ["host", "triton"])
def test_pages_arrive(
    prefill: Prefill, target: Spec, implementation: Literal["host", "triton"]
) -> None:
    """Several requests through one mapping; every byte of the decoder's memory is compared."""
    driver = FakeDriver()
    cache = own_cache(target, SHAPE.layers)
    with map_it(prefill, driver) as mapping:
        assert [region.layers for region in mapping.regions] == [
            region.layers for region in prefill.handshake.description.regions
        ]
        source = Pages.of(page_format(STANDARD), mapping.regions, mapping.storages)
        conversion = prepare(source, cache.pages, implementation=implementation, tuning=DIRECT)
        for theirs, ours in (([8, 0, 3], [2, 11, 5]), ([7], [0]), ([3, 1], [4, 1])):
            for layer in range(SHAPE.layers):
                for a, b in zip(theirs, ours, strict=True):
                    cache.write(layer, b, write_page(target, *SHAPE.tokens(layer, a)))
            conversion(torch.tensor(theirs), torch.tensor(ours))
            assert cache.differing().size == 0
        # Two allocations hold the four layers, each is opened once.
        assert [call.split()[0] for call in driver.calls] == ["open", "open"]
        assert prefill.ask("mapped") == 1
    assert driver.num_open == 0
    assert eventually(lambda: prefill.ask("mapped") == 0)
    assert prefill.ask("unchanged") == 1


def test_views_are_the_prefills_memory_and_no_copy(prefill: Prefill) -> None:
    driver = FakeDriver()
    with map_it(prefill, driver) as mapping:
        for storage in mapping.storages:
            memory = driver.memory[storage.data_ptr()]
            assert (storage.dtype, storage.dim()) == (torch.uint8, 1)
            assert storage.numel() == len(memory)
            memory[5] ^= 0xFF
            assert int(storage[5]) == memory[5]
        assert prefill.ask("unchanged") == 0


def test_close_unmaps_before_the_exporter_is_told_and_is_idempotent(prefill: Prefill) -> None:
    class Watching(FakeDriver):
        def close(self, mapped: Any, device: int) -> None:
            self.calls.append(f"mapped {prefill.ask('mapped')}")
            super().close(mapped, device)

    driver = Watching()
    mapping = map_it(prefill, driver)
    mapping.close()
    assert [call for call in driver.calls if call.startswith("mapped")] == ["mapped 1"] * 2
    assert driver.num_open == 0
    mapping.close()
    assert driver.num_open == 0
    assert not mapping.is_offered()


def test_a_mapping_that_nobody_holds_stays_known_to_the_exporter(prefill: Prefill) -> None:
    storages = map_it(prefill).storages
    assert prefill.ask("mapped") == 1
    assert len(storages) == 2


def test_two_decoders_and_one_that_maps_again(prefill: Prefill) -> None:
    first, second = map_it(prefill), map_it(prefill)
    assert prefill.ask("mapped") == 2
    first.close()
    third = map_it(prefill)
    assert eventually(lambda: prefill.ask("mapped") == 2)
    assert int(second.storages[0][-1]) == int(third.storages[0][-1])
    second.close()
    third.close()
    assert eventually(lambda: prefill.ask("mapped") == 0)


def test_a_killed_prefill_is_noticed_and_its_pages_stay_readable(prefill: Prefill) -> None:
    mapping = map_it(prefill)
    source = Pages.of(page_format(STANDARD), mapping.regions, mapping.storages)
    assert mapping.is_offered()
    prefill.kill()
    assert not mapping.is_offered()
    cache = own_cache(STANDARD, SHAPE.layers)
    conversion = prepare(source, cache.pages)
    for layer in range(SHAPE.layers):
        cache.write(layer, 1, write_page(STANDARD, *SHAPE.tokens(layer, 2)))
    conversion(torch.tensor([2]), torch.tensor([1]))
    assert cache.differing().size == 0
    mapping.close()
    with pytest.raises(DirectError) as caught:
        map_it(prefill)
    assert caught.value.code == "unreachable"


def test_a_withdrawn_offer_waits_for_requesters_to_unmap(prefill: Prefill) -> None:
    mapping = map_it(prefill)
    # Not unmapped in time: the exporter says so, and may not free its memory.
    assert prefill.ask("close 0.05") == 1
    assert not mapping.is_offered()
    with pytest.raises(DirectError) as caught:
        map_it(prefill)
    assert caught.value.code == "unreachable"
    mapping.close()


def test_a_requester_that_unmaps_in_time_is_waited_for(prefill: Prefill) -> None:
    mapping = map_it(prefill)
    prefill.tell("close 30")
    began = time.monotonic()
    assert eventually(lambda: not mapping.is_offered())
    mapping.close()
    assert prefill.answer() == 0
    assert time.monotonic() - began < 10


def test_a_prefill_that_hangs_is_given_up_after_the_timeout(prefill: Prefill) -> None:
    driver = FakeDriver()
    os.kill(prefill.process.pid, signal.SIGSTOP)
    os.waitpid(prefill.process.pid, os.WUNTRACED)  # until all of its threads stand
    began = time.monotonic()
    with pytest.raises(DirectError) as caught:
        map_it(prefill, driver, timeout_seconds=0.3)
    assert caught.value.code == "timeout"
    assert 0.2 < time.monotonic() - began < 5
    assert driver.calls == []
    prefill.process.send_signal(signal.SIGCONT)
    map_it(prefill).close()


def moved(region: Region, **changes: int) -> Region:
    """A peer's region with other numbers, as a hostile peer could publish it."""
    numbers = {
        name: getattr(region, name)
        for name in ("address", "num_blocks", "block_bytes", "block_stride_bytes")
    }
    numbers["extent_bytes"] = region.extent_bytes
    numbers |= changes
    extent = numbers.pop("extent_bytes")
    return Region(
        *numbers.values(),
        format=region.format,
        planes=region.planes,
        layers=region.layers,
        memory="vram",
        extent_bytes=extent,
    )


def test_extents_are_those_of_the_mapping(prefill: Prefill) -> None:
    """Regions that end with the mapping are served, one byte further is refused."""
    driver = FakeDriver()
    regions = list(prefill.handshake.description.regions)
    last = max(range(2), key=lambda at: regions[at].address)
    with map_it(prefill, driver, regions=regions[:2]) as mapping:
        mapped = driver.memory[mapping.storages[0].data_ptr()]
        offset = mapping.regions[last].address - mapping.storages[0].data_ptr()
    room = len(mapped) - offset - regions[last].extent_bytes
    assert room == SHAPE.gap_bytes + SHAPE.spare_bytes
    moving = regions[last].address + room
    blocks_more = room // regions[last].block_bytes + 1
    wide = (regions[last].extent_bytes + room) // regions[last].num_blocks
    hostile = {
        "one byte too far": {"address": moving + 1},
        "behind the mapping": {"address": moving + (1 << 30)},
        "near the end of 64 bits": {"address": 2**63 - 2**20},
        "more blocks": {"num_blocks": SHAPE.blocks + blocks_more, "extent_bytes": 2**40},
        "an extent too long": {"extent_bytes": regions[last].extent_bytes + room + 1},
        "a wider stride": {"block_stride_bytes": 2 * wide, "extent_bytes": 2 * wide * SHAPE.blocks},
    }
    regions[last] = moved(regions[last], address=moving)
    map_it(prefill, driver, regions=regions).close()
    for changes in hostile.values():
        numbers = {"address": prefill.handshake.description.regions[last].address, **changes}
        regions[last] = moved(prefill.handshake.description.regions[last], **numbers)
        with pytest.raises(DirectError) as caught:
            map_it(prefill, driver, regions=regions)
        assert caught.value.code == "outside-mapping"
        assert driver.num_open == 0
    assert eventually(lambda: prefill.ask("mapped") == 0)


def test_a_region_below_every_allocation(prefill: Prefill) -> None:
    regions = [moved(prefill.handshake.description.regions[0], address=16)]
    driver = FakeDriver()
    with pytest.raises(DirectError) as caught:
        map_it(prefill, driver, regions=regions)
    assert caught.value.code == "outside-mapping"
    assert driver.calls == []


def test_a_failure_in_the_middle_leaves_nothing_mapped(prefill: Prefill) -> None:
    driver = FakeDriver(fail_open_after=1)
    with pytest.raises(DirectError) as caught:
        map_it(prefill, driver)
    assert caught.value.code == "driver"
    assert [call.split()[0] for call in driver.calls] == ["open", "close"]
    assert eventually(lambda: prefill.ask("mapped") == 0)


def test_an_exporter_that_is_not_the_one_of_the_offer(prefill: Prefill) -> None:
    part = prefill.handshake.direct
    assert part is not None
    other = msgspec.structs.replace(part, host=msgspec.structs.replace(part.host, pid=1))
    driver = FakeDriver()
    with pytest.raises(DirectError) as caught:
        map_it(prefill, driver, part=other)
    assert caught.value.code == "wrong-exporter"
    assert driver.calls == []


def test_gpus_that_cannot_reach_each_other(prefill: Prefill) -> None:
    driver = FakeDriver(uuids=(UUIDS[1], UUIDS[0]), unreachable=frozenset({(0, 1)}))
    with pytest.raises(DirectError) as caught:
        map_it(prefill, driver)
    assert (caught.value.code, caught.value.got) == ("unreachable-gpu", UUIDS[0])
    assert prefill.ask("mapped") == 0
    # With access they can; a GPU that this process does not see is the driver's to judge.
    map_it(prefill, FakeDriver(uuids=(UUIDS[1], UUIDS[0]))).close()
    map_it(prefill, FakeDriver(uuids=(UUIDS[2],))).close()


def test_another_runtime_or_host_is_refused_without_asking(prefill: Prefill) -> None:
    part = prefill.handshake.direct
    assert part is not None
    replace = msgspec.structs.replace
    driver = FakeDriver()
    for other, code in (
        (replace(part, runtime="rocm"), "other-runtime"),
        (replace(part, host=replace(part.host, ipc_namespace=7)), "other-host"),
        (replace(part, host=replace(part.host, pid=os.getpid())), "same-process"),
    ):
        with pytest.raises(DirectError) as caught:
            map_it(prefill, driver, part=other)
        assert caught.value.code == code
    assert driver.calls == []
    assert prefill.ask("mapped") == 0


def test_regions_in_host_memory(prefill: Prefill) -> None:
    region = prefill.handshake.description.regions[0]
    host = Region(region.address, 1, 16, 16)
    with pytest.raises(DirectError) as caught:
        map_it(prefill, regions=[host])
    assert caught.value.code == "not-one-gpu"
    with pytest.raises(DirectError):
        map_it(prefill, regions=[])


def test_a_torch_that_cannot_view_foreign_memory(
    prefill: Prefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(torch._C, "_construct_storage_from_data_pointer")
    driver = FakeDriver()
    with pytest.raises(DirectError) as caught:
        map_it(prefill, driver)
    assert caught.value.code == "no-view"
    assert driver.num_open == 0


def test_no_conversion_reads_beyond_the_regions(prefill: Prefill) -> None:
    """Ids beyond the peer's blocks are refused: the memory behind them is not the cache's."""
    cache = own_cache(STANDARD, SHAPE.layers)
    with map_it(prefill) as mapping:
        source = Pages.of(page_format(STANDARD), mapping.regions, mapping.storages)
        assert source.num_blocks == SHAPE.blocks
        conversion = prepare(source, cache.pages)
        with pytest.raises(ValueError, match="names block"):
            conversion(torch.tensor([SHAPE.blocks]), torch.tensor([0]))
