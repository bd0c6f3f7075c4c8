"""The state machine of one request: queued, reading, converting, then ready or failed.

See `kvpd.request.State` for the picture. Every call moves a request as far as it can go without
waiting.
"""

from __future__ import annotations

from collections.abc import Callable

from kvpd.convert import ConversionQueue
from kvpd.errors import KvpdError, TransferError
from kvpd.nixl import Agent
from kvpd.request import (
    DescriptorCounts,
    Failed,
    FailureCode,
    Outcome,
    Ready,
    Request,
    State,
    Timings,
)


class Pipeline:
    """Moves requests.

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
        """Mark a request failed; `advance` ends it once nothing can write its memory.

        The first cause stands. A conversion that runs is left to end.
        """
        if request.failure is None:
            request.failure = (code, reason)
        if request.state is not State.CONVERTING:
            request.state = State.DRAINING

    def advance(self, request: Request) -> Outcome | None:
        """Move a request on, and return its outcome when it has ended."""
        if request.state is State.QUEUED:
            self._begin(request)
        if request.state is State.READING:
            self._watch_read(request)
        if request.state is State.CONVERTING and self._is_converted(request):
            return self._ready(request) if request.failure is None else _failed(request)
        if request.state is State.DRAINING and self._is_drained(request):
            return _failed(request)
        return None

    def _begin(self, request: Request) -> None:
        peer, slab, now = request.peer, request.peer.slab, self._clock()
        if request.is_late(now):
            self.fail(request, "deadline-passed", "the deadline passed before the READ")
        elif slab is not None and slab.lost:
            self.fail(request, "conversion-failed", slab.lost)
        elif slab is None or slab.is_owned_by(request.request_id):
            request.started_at = request.read_at = now
            if request.runs.num_pages == 0:
                request.state = State.CONVERTING
                return
            landing = peer.landing(request.runs)
            request.descriptors = DescriptorCounts(
                planned=peer.plan.num_descriptors(landing),
                merged=peer.plan.num_merged_descriptors(landing),
                counted=None,
            )
            try:
                request.transfer = peer.read(self._agent, landing)
                request.state = State.READING
            except KvpdError as error:
                self.fail(request, "read-failed", str(error))

    def _watch_read(self, request: Request) -> None:
        transfer = request.transfer
        if transfer is None:
            raise TransferError("reading without a transfer", code="state", field="transfer")
        state = self._agent.poll(transfer)
        request.read_at = self._clock()
        if state == "failed":
            self.fail(request, "read-failed", transfer.error)
        elif request.is_late(request.read_at):
            # Also when the READ is done by now: when it ended is not known better than this, and
            # a page read after the deadline can be another request's.
            self.fail(request, "deadline-passed", "the deadline passed during the READ")
        elif state == "done":
            self._convert(request)

    def _convert(self, request: Request) -> None:
        conversion = request.peer.conversion
        if request.transfer is not None:
            counted = self._agent.telemetry(request.transfer)
            request.count(None if counted is None else counted.num_descriptors)
        if conversion is not None:
            if self._queue is None:
                self.fail(request, "conversion-failed", "no queue to convert on")
                return
            # A conversion in place must not run twice. Whatever escapes from here leaves the
            # request failed, never in a state in which the next call would submit it again.
            request.state = State.DRAINING
            request.failure = ("conversion-failed", "the conversion was not submitted")
            raw_ids = request.peer.landing(request.runs).local_ids
            try:
                request.completion = self._queue.submit(conversion, raw_ids, request.runs.local_ids)
            except KvpdError as error:
                request.failure = ("conversion-failed", str(error))
                if error.code == "device-failed" and request.peer.slab is not None:
                    request.peer.slab.lose(f"a conversion may still run: {error}")
                return
            request.failure = None
        request.state = State.CONVERTING

    def _is_converted(self, request: Request) -> bool:
        try:
            if request.completion is not None and not request.completion.done():
                return False
        except KvpdError as error:
            # Whether the kernel still reads the slab is unknown for good.
            if request.peer.slab is not None:
                request.peer.slab.lose(f"a conversion ended without an answer: {error}")
            request.completion = None
            request.failure = ("conversion-failed", str(error))
        return self._is_released(request)

    def _is_drained(self, request: Request) -> bool:
        if request.transfer is not None:
            self._agent.poll(request.transfer)
        return self._is_released(request)

    def _is_released(self, request: Request) -> bool:
        return request.transfer is None or self._agent.release(request.transfer)

    def _ready(self, request: Request) -> Ready:
        converted_at = self._clock()
        notice_error = ""
        try:
            self._agent.notify(request.peer.agent_name, request.notice)
        except TransferError as error:
            notice_error = str(error)
        num_blocks = request.runs.num_pages
        return Ready(
            request_id=request.request_id,
            num_blocks=num_blocks,
            num_bytes=num_blocks * request.peer.plan.page_bytes_all_layers,
            descriptors=request.descriptors,
            timings=Timings(
                queued_seconds=request.started_at - request.queued_at,
                read_seconds=request.read_at - request.started_at,
                convert_seconds=converted_at - request.read_at,
            ),
            notice_error=notice_error,
        )


def _failed(request: Request) -> Failed:
    code, reason = request.failure or ("read-failed", "")
    return Failed(request.request_id, code, reason, request.blocks())
