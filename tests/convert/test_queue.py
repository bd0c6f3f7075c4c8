"""The conversion queue on host memory, and its ring with a device's events played by hand."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from kvpd import ConversionError
from kvpd.convert import Completion, ConversionQueue, stream
from kvpd.convert.host import HostConversion
from tests.convert.cases import Case, SetUp, pair, set_up


def conversion_of(in_place: bool) -> tuple[HostConversion, SetUp]:
    specs = pair(2, 16, 64, "bfloat16", "tiled", reverse=False)
    setup = set_up(Case(*specs, in_place, "planes", 0, torch.int32))
    return HostConversion(setup.source, setup.target.pages), setup


@pytest.mark.parametrize("in_place", [True, False])
def test_host_pages_are_converted_at_once(in_place: bool) -> None:
    conversion, setup = conversion_of(in_place)
    queue = ConversionQueue("cpu")
    completion = queue.submit(conversion, setup.source_ids.numpy(), setup.target_ids.numpy())
    assert completion.done() and completion.done()
    assert setup.target.differing().size == 0


def test_ids_are_checked_before_anything_runs() -> None:
    conversion, setup = conversion_of(False)
    before = setup.target.memory.clone()
    queue = ConversionQueue("cpu")
    good = np.array([0, 1], dtype=np.int32)
    for source_ids, target_ids, code in (
        (good, good[:1], "ids-kind"),
        (good.astype(np.int64), good, "ids-kind"),
        (good, good.reshape(1, 2), "ids-kind"),
        (good, np.array([0, 5], dtype=np.int32), "id-range"),
        (np.array([0, 7], dtype=np.int32), good, "id-range"),
    ):
        with pytest.raises(ConversionError) as caught:
            queue.submit(conversion, source_ids, target_ids)  # type: ignore[arg-type]
        assert caught.value.code == code
    assert torch.equal(before, setup.target.memory)


def test_in_place_ids_must_be_the_same() -> None:
    conversion, _ = conversion_of(True)
    ids = np.array([0, 1], dtype=np.int32)
    with pytest.raises(ConversionError) as caught:
        ConversionQueue("cpu").submit(conversion, ids, ids[::-1].copy())
    assert caught.value.code == "in-place-ids"


@pytest.mark.parametrize("field", ["num_slots", "max_ids"])
def test_sizes(field: str) -> None:
    sizes: dict[str, Any] = {field: 0}
    with pytest.raises(ConversionError) as caught:
        ConversionQueue("cpu", **sizes)
    assert (caught.value.code, caught.value.field) == ("queue-size", field)


class FakeStream:
    """A stream of the host that knows whether it is current."""

    device = torch.device("cpu")
    is_current = False

    def __enter__(self) -> None:
        self.is_current = True

    def __exit__(self, *error: object) -> None:
        self.is_current = False


STREAM: Any = FakeStream()


class Event:
    """A device event whose completion the test decides."""

    def __init__(self) -> None:
        self.complete = True
        self.waits = 0
        self.broken = False

    def record(self, stream: Any) -> None:
        assert stream is STREAM
        self.complete = False

    def query(self) -> bool:
        if self.broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return self.complete

    def synchronize(self) -> None:
        self.waits += 1
        self.complete = True


@pytest.fixture
def plain_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots whose pinned and device memory is plain memory."""
    empty = torch.empty

    def unpinned(*args: Any, **kwargs: Any) -> torch.Tensor:
        kwargs.pop("pin_memory", None)
        return empty(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", unpinned)
    monkeypatch.setattr(torch.cuda, "Event", Event)


@pytest.fixture
def slot(plain_memory: None) -> Any:
    return stream._Slot(STREAM, 8)


def test_memory_of_a_dropped_queue_waits_for_its_kernels(
    monkeypatch: pytest.MonkeyPatch, plain_memory: None
) -> None:
    """They may read their ids from a slot's pinned memory, which torch would hand out again."""
    slots: list[weakref.ref[Any]] = []
    alive: list[bool] = []

    class FakeSideStream(FakeStream):
        def synchronize(self) -> None:
            alive.append(slots[0]() is not None)

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: FakeSideStream())
    queue = ConversionQueue("cuda", num_slots=1, max_ids=8)
    slots.append(weakref.ref(queue._slots[0]))
    del queue
    gc.collect()
    assert alive == [True] and slots[0]() is None


def test_slot_in_flight_is_waited_for_before_its_ids_change(slot: Any) -> None:
    conversion, setup = conversion_of(False)
    ids = [setup.source_ids.numpy(), setup.target_ids.numpy()]
    slot.convert(conversion, *ids)
    first = Completion(slot)
    assert not first.done() and slot._event.waits == 0
    assert setup.target.differing().size == 0
    slot.convert(conversion, *ids)
    assert slot._event.waits == 1
    second = Completion(slot)
    assert first.done(), "its slot was reused, so it had completed"
    assert not second.done()
    slot._event.complete = True
    assert second.done() and first.done()


@pytest.mark.parametrize("in_place", [False, True])
def test_ids_are_uploaded_on_the_stream_unless_the_conversion_reads_them(
    slot: Any, in_place: bool
) -> None:
    uploaded: list[list[int]] = []
    read: list[list[int]] = []

    class FakeConversion:
        """Notes with which ids it is called."""

        takes = False

        def __init__(self) -> None:
            self.in_place = in_place

        def enqueue_with_host_ids(self, ids: torch.Tensor, num_ids: int, on: Any) -> bool:
            assert on is STREAM
            if self.takes:
                read.append(ids[: num_ids if in_place else 2 * num_ids].tolist())
            return self.takes

        def __call__(self, source_ids: torch.Tensor, target_ids: torch.Tensor) -> None:
            assert STREAM.is_current
            assert (source_ids is target_ids) == in_place
            uploaded.append([*target_ids.tolist(), *([] if in_place else source_ids.tolist())])

    conversion: Any = FakeConversion()
    theirs = np.array([5, 6, 7], np.int32)
    ours = theirs if in_place else np.array([1, 2, 3], np.int32)
    packed = [5, 6, 7] if in_place else [1, 2, 3, 5, 6, 7]
    slot.convert(conversion, theirs, ours)
    assert (uploaded, read) == ([packed], [])
    conversion.takes = True
    slot.convert(conversion, theirs, ours)
    assert (uploaded, read) == ([packed], [packed])
    assert not slot._event.complete, "both are waited for"


def test_device_errors_are_not_swallowed(slot: Any) -> None:
    conversion, setup = conversion_of(False)
    ids = [setup.source_ids.numpy(), setup.target_ids.numpy()]
    slot.convert(conversion, *ids)
    completion = Completion(slot)
    slot._event.broken = True
    for failing in (completion.done, lambda: slot.convert(conversion, *ids)):
        with pytest.raises(ConversionError) as caught:
            failing()
        assert caught.value.code == "device-failed"
        assert "illegal memory access" in str(caught.value)


def test_slot_stays_in_flight_when_the_conversion_fails(slot: Any) -> None:
    """The uploads before the failure still read its memory."""
    conversion, _ = conversion_of(False)
    wrong = np.array([99], dtype=np.int32)
    with pytest.raises(ConversionError):
        slot.convert(conversion, wrong, wrong)
    assert not slot.is_free()
