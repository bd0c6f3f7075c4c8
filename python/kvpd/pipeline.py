"""Moves chunks: taken from their request, read, converted, ended. Nothing here waits.

See `kvpd.chunk.State` for the picture.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from kvpd.chunk import Chunk, State
from kvpd.convert import ConversionQueue
from kvpd.errors import KvpdError, TransferError
from kvpd.nixl import Agent
from kvpd.request import (
    DescriptorCounts,
    Failed,
    FailureCode,
    NotHeld,
    Outcome,
    Ready,
    Request,
    Timings,
)


class Pipeline:
    """Moves the chunks of requests.

    Args:
        agent: reads, and sends the release notices.
        queue: runs conversions; None where no peer needs one.
        clock: seconds; deadlines are readings of it.
    """

    def __init__(
        self, agent: Agent, queue: ConversionQueue | None, clock: Callable[[], float]
    ) -> None:
        self._agent = agent
        self._queue = queue
        self._clock = clock

    def fail(self, request: Request, code: FailureCode, reason: str) -> None:
        """Mark a request failed; `outcome` ends it once nothing can write its memory.

        The first cause stands. Conversions that run are left to end.
        """
        if request.failure is None:
            request.failure = (code, reason)
        request.waiting.clear()
        for chunk in request.active:
            if chunk.state is State.READING:
                chunk.state = State.DRAINING

    def check_deadline(self, request: Request) -> None:
        """Fail a request that is late and has chunks that were not begun."""
        if request.waiting and request.is_late(self._clock()):
            self.fail(request, "deadline-passed", "the deadline passed before everything was read")

    def can_begin(self, chunk: Chunk) -> bool:
        """Whether a chunk needs no slot and would not wait for earlier conversions to end."""
        if chunk.needs_slot:
            return False
        if chunk.is_read or self._queue is None:
            return True
        try:
            return self._queue.has_room
        except KvpdError:
            return True  # the submit will fail, and the request with it

    def begin(self, request: Request, slot: int | None = None) -> None:
        """Begin the next waiting chunk, in `slot` if it needs one."""
        began = time.perf_counter()
        chunk = request.waiting.popleft()
        if slot is not None:
            chunk.occupy(slot, request.peer.planner.slot_stride_pages)
        request.active.append(chunk)
        if request.started_at is None:
            request.started_at = request.read_at = self._clock()
        if not chunk.is_read:
            self._convert(request, chunk)
        else:
            try:
                chunk.transfer = request.peer.read(self._agent, request.plan, chunk)
            except Exception as error:
                # Nothing was posted: a READ that was comes back as a transfer, whatever happened.
                self.fail(request, "read-failed", str(error))
        request.post_seconds += time.perf_counter() - began

    def advance(self, request: Request) -> list[Chunk]:
        """Move a request's chunks as far as they go; returns those that have ended."""
        ended: list[Chunk] = []
        for chunk in list(request.active):
            if chunk.state is State.READING:
                self._watch_read(request, chunk)
            if self._is_converted(request, chunk) and self._is_released(chunk):
                ended.append(chunk)
        request.active = [chunk for chunk in request.active if chunk not in ended]
        return ended

    def outcome(self, request: Request) -> Outcome | None:
        """How a request ended; None as long as anything of it waits, is active or is asked."""
        self._check_held(request)
        if request.waiting or request.active:
            return None
        if request.failure is None:
            if request.converted_at is None:
                request.converted_at = self._clock()
            if request.is_held is not None and request.held_at is None:
                return None
            return self._ready(request, request.converted_at)
        code, reason = request.failure
        return Failed(request.request_id, code, reason, request.blocks())

    def _check_held(self, request: Request) -> None:
        """Once nothing more is read, ask whether it was the request's own until then.

        Earlier, the answer would say nothing of what is read after it. Conversions go on.
        """
        if request.is_held is None or request.held_at is not None:
            return
        if request.failure is not None or not request.is_read:
            return
        answer = request.is_held()
        if isinstance(answer, NotHeld):
            self.fail(request, answer.code, answer.reason)
        elif answer is not None:
            request.held_at = self._clock()

    def _watch_read(self, request: Request, chunk: Chunk) -> None:
        transfer = chunk.transfer
        if transfer is None:
            raise TransferError("reading without a transfer", code="state", field="transfer")
        state = self._agent.poll(transfer)
        now = self._clock()
        if state == "failed":
            self.fail(request, "read-failed", transfer.error)
        elif request.is_late(now):
            # Nobody can be asked. Also when the READ is done by now: when it ended is not known
            # better than this, and a page read after the deadline can be another request's.
            self.fail(request, "deadline-passed", "the deadline passed during the READ")
        elif state == "done":
            request.read_at = now
            counted = self._agent.telemetry(transfer)
            request.count(None if counted is None else counted.num_descriptors)
            self._convert(request, chunk)

    def _convert(self, request: Request, chunk: Chunk) -> None:
        if chunk.conversion is None:
            chunk.state = State.CONVERTING
            return
        if self._queue is None:
            self.fail(request, "conversion-failed", "no queue to convert on")
            return
        # A conversion in place must not run twice. Whatever escapes from here leaves the request
        # failed, never in a state in which the next call would submit the chunk again.
        chunk.state = State.DRAINING
        request.failure = ("conversion-failed", "the conversion was not submitted")
        try:
            chunk.completion = self._queue.submit(
                chunk.conversion, chunk.source_ids, chunk.target_ids
            )
        except Exception as error:
            # Nothing of it runs any more: `submit` has waited for what it had launched.
            request.failure = None
            self.fail(request, "conversion-failed", str(error))
            if isinstance(error, KvpdError) and error.code == "device-failed":
                request.peer.lose(f"a conversion may still run: {error}")
            return
        request.failure = None
        chunk.state = State.CONVERTING

    def _is_converted(self, request: Request, chunk: Chunk) -> bool:
        if chunk.state is State.READING:
            return False
        try:
            if chunk.completion is not None and not chunk.completion.done():
                return False
        except KvpdError as error:
            # Whether the kernel still reads its source is unknown for good.
            request.peer.lose(f"a conversion ended without an answer: {error}")
            chunk.completion = None
            self.fail(request, "conversion-failed", str(error))
        if chunk.completion is not None and not chunk.is_read:
            # The conversion was the read.
            chunk.completion = None
            request.read_at = self._clock()
            if request.is_late(request.read_at):
                self.fail(request, "deadline-passed", "the deadline passed during the read")
        return True

    def _is_released(self, chunk: Chunk) -> bool:
        return chunk.transfer is None or self._agent.release(chunk.transfer)

    def _ready(self, request: Request, converted_at: float) -> Ready:
        notice_error = ""
        try:
            self._agent.notify(request.peer.agent_name, request.notice)
        except TransferError as error:
            notice_error = str(error)
        started_at = converted_at if request.started_at is None else request.started_at
        read_at = max(request.read_at, started_at)
        plan = request.plan
        return Ready(
            request_id=request.request_id,
            placement=plan.placement,
            is_converted=request.peer.verdict.kind == "convert",
            num_blocks=plan.num_pages,
            num_bytes=plan.num_bytes,
            descriptors=DescriptorCounts(
                plan.num_descriptors, plan.num_merged_descriptors, request.counted
            ),
            timings=Timings(
                queued_seconds=started_at - request.queued_at,
                read_seconds=read_at - started_at,
                convert_seconds=converted_at - read_at,
                held_seconds=None if request.held_at is None else request.held_at - read_at,
            ),
            post_seconds=request.post_seconds,
            notice_error=notice_error,
        )
