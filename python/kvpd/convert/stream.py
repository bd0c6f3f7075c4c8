"""Conversions beside the step path: a side stream, pinned ids, and completions that never block."""

from __future__ import annotations

import weakref
from contextlib import suppress

import numpy as np
import torch
from numpy.typing import NDArray

from kvpd.convert.conversion import Conversion, check_id_values
from kvpd.errors import ConversionError


class Completion:
    """Whether everything of one `ConversionQueue.submit` has been written."""

    def __init__(self, slot: _Slot | None) -> None:
        self._slot = slot
        self._turn = slot.turn if slot is not None else 0

    def done(self) -> bool:
        """Poll without blocking.

        Raises:
            ConversionError: the device reports an error; the pages must be taken as not converted.
        """
        slot = self._slot
        if slot is None:
            return True
        # The slot serves a later submit: its reuse waited for this one's event.
        if slot.turn != self._turn or slot.is_free():
            self._slot = None
            return True
        return False


class ConversionQueue:
    """Runs conversions in order on a side stream of one device.

    A conversion first waits for what was enqueued on the submitting thread's current stream, and
    nothing waits for it but those who ask its `Completion`. Ids go through a ring of pinned slots;
    a slot is reused only when the conversion that reads it has completed, so a call allocates
    nothing and blocks only when `num_slots` conversions are still in flight. On CPU devices a
    submit converts at once. Not thread-safe: one queue per submitting thread.
    """

    def __init__(
        self, device: torch.device | str, *, num_slots: int = 32, max_ids: int = 8192
    ) -> None:
        """`max_ids` ids fit a slot; longer requests take several slots and launches.

        Raises:
            ConversionError: a count below 1.
        """
        for field, count in (("num_slots", num_slots), ("max_ids", max_ids)):
            if count < 1:
                raise ConversionError(
                    f"{field} is {count}",
                    code="queue-size",
                    field=field,
                    got=count,
                    expected=">= 1",
                )
        self.device = torch.device(device)
        self._max_ids = max_ids
        self._next = 0
        self._slots: list[_Slot] = []
        if self.device.type != "cpu":
            self._stream = torch.cuda.Stream(self.device)
            self._submitted = torch.cuda.Event()
            self._slots = [_Slot(self._stream, max_ids) for _ in range(num_slots)]
            # Before the slots' memory is anybody else's: a kernel that still runs reads its ids
            # there, and torch knows of no use by which it would keep the memory itself.
            weakref.finalize(self, _let_end, self._stream).atexit = False

    @property
    def has_room(self) -> bool:
        """Whether a submit would find a free slot and not wait for one.

        Raises:
            ConversionError: the device reports an error.
        """
        return not self._slots or self._slots[self._next % len(self._slots)].is_free()

    def submit(
        self,
        conversion: Conversion,
        source_ids: NDArray[np.int32],
        target_ids: NDArray[np.int32],
    ) -> Completion:
        """Convert page ``source_ids[i]`` into page ``target_ids[i]`` of every layer.

        Args:
            conversion: what `prepare` built for pages on this queue's device.
            source_ids: [pages] int32, as a transfer plan gives them; negative ids are padding.
            target_ids: [pages] int32; in place, the same ids.

        Raises:
            ConversionError: ids beyond the pages, unequal lengths, or another device. Nothing runs.
                With code "device-failed": the device cannot say any more whether something runs.
        """
        self._check(conversion, source_ids, target_ids)
        if self.device.type == "cpu":
            ids_in = torch.from_numpy(np.ascontiguousarray(source_ids))
            same = conversion.in_place
            ids_out = ids_in if same else torch.from_numpy(np.ascontiguousarray(target_ids))
            conversion(ids_in, ids_out)
            return Completion(None)
        if not source_ids.size:
            return Completion(None)
        completion: Completion | None = None
        try:
            completion = self._enqueue(conversion, source_ids, target_ids)
        except RuntimeError as error:
            raise device_error(self.device, error) from error
        finally:
            if completion is None:
                # Kernels of earlier parts may run: whoever sees the error frees what they read.
                self._wait()
        return completion

    def _wait(self) -> None:
        try:
            self._stream.synchronize()
        except RuntimeError as error:
            raise device_error(self.device, error) from error

    def _enqueue(
        self, conversion: Conversion, source_ids: NDArray[np.int32], target_ids: NDArray[np.int32]
    ) -> Completion:
        self._submitted.record(torch.accelerator.current_stream(self._stream.device_index))
        self._stream.wait_event(self._submitted)
        for first in range(0, source_ids.size, self._max_ids):
            part = slice(first, first + self._max_ids)
            slot = self._slots[self._next]
            self._next = (self._next + 1) % len(self._slots)
            slot.convert(conversion, source_ids[part], target_ids[part])
        # Slots complete in stream order: the last one speaks for all of this call.
        return Completion(slot)

    def _check(
        self, conversion: Conversion, source_ids: NDArray[np.int32], target_ids: NDArray[np.int32]
    ) -> None:
        if conversion.target.device.type != self.device.type or (
            self.device.index is not None and conversion.target.device != self.device
        ):
            raise ConversionError(
                f"pages are on {conversion.target.device}, the queue on {self.device}",
                code="queue-device",
                field="conversion",
                got=conversion.target.device,
                expected=self.device,
            )
        for field, ids in (("source_ids", source_ids), ("target_ids", target_ids)):
            if ids.dtype != np.int32 or ids.ndim != 1 or ids.size != target_ids.size:
                raise ConversionError(
                    f"{field} is {ids.dtype}{list(ids.shape)}",
                    code="ids-kind",
                    field=field,
                    got=f"{ids.dtype}{list(ids.shape)}",
                    expected=f"int32[{target_ids.size}]",
                )
        check_id_values(conversion, source_ids, target_ids)


class _Slot:
    """Pinned and device memory for the ids of one launch, and the event after it."""

    def __init__(self, stream: torch.cuda.Stream, max_ids: int) -> None:
        self._pinned = torch.empty(2 * max_ids, dtype=torch.int32, pin_memory=True)
        self._pinned_ids = self._pinned.numpy()
        self._ids = torch.empty(2 * max_ids, dtype=torch.int32, device=stream.device)
        self._event = torch.cuda.Event()
        self._stream = stream
        self.turn = 0

    def is_free(self) -> bool:
        """Whether nothing enqueued reads this slot any more."""
        try:
            return bool(self._event.query())
        except RuntimeError as error:
            raise device_error(self._stream.device, error) from error

    def convert(
        self, conversion: Conversion, source_ids: NDArray[np.int32], target_ids: NDArray[np.int32]
    ) -> None:
        """Enqueue the conversion, with an upload of the ids where it needs one, and the event."""
        # Without this wait the host would overwrite ids that a copy in flight still reads.
        if not self.is_free():
            self._event.synchronize()
        self.turn += 1
        count = source_ids.size
        sides = (target_ids,) if conversion.in_place else (target_ids, source_ids)
        for side, side_ids in enumerate(sides):
            self._pinned_ids[side * count : (side + 1) * count] = side_ids
        try:
            if not conversion.enqueue_with_host_ids(self._pinned, count, self._stream):
                self._upload_and_convert(conversion, count, len(sides) * count)
        finally:
            # Recorded even when the launch failed: an upload before it still reads the slot.
            self._event.record(self._stream)

    def _upload_and_convert(self, conversion: Conversion, count: int, used: int) -> None:
        # Makes the stream's device current too. torch.cuda's context managers take longer.
        with self._stream:
            # Both sides in one copy: for a few pages copies take longer than the kernel.
            self._ids[:used].copy_(self._pinned[:used], non_blocking=True)
            ids_out = self._ids[:count]
            conversion(ids_out if conversion.in_place else self._ids[count:used], ids_out)


def _let_end(stream: torch.cuda.Stream) -> None:
    with suppress(RuntimeError):  # the device failed: nothing runs any more
        stream.synchronize()


def device_error(device: torch.device, error: RuntimeError) -> ConversionError:
    """A failure of the device or its driver as one of ours."""
    return ConversionError(
        f"{device} failed: {error}", code="device-failed", field="device", got=error, expected="ok"
    )
