"""The only importer of NIXL: a thin, typed agent whose failures are `TransferError`.

NIXL comes as ``nixl`` (which picks a build), ``nixl_cu13``, ``nixl_cu12`` or, on ROCm,
``nixl_rocm`` (RIXL). All of them have one Python interface.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from kvpd._kvpd import Region
from kvpd.errors import MissingDependencyError, TransferError

if TYPE_CHECKING:
    from kvpd.words import Memory

_MODULES = ("nixl._api", "nixl_cu13._api", "nixl_cu12._api", "nixl_rocm._api")
_MEMORY_NAMES = {"dram": "DRAM", "vram": "VRAM"}

TransferState = Literal["active", "done", "failed"]
# Bytes in NIXL 1.5, though it says text. Kept as it came: `str` of bytes is another name.
AgentName = str | bytes


@dataclass(frozen=True)
class MemoryRange:
    """Bytes [address, address + num_bytes) of one device; device 0 for host memory."""

    address: int
    num_bytes: int
    memory: Memory = "dram"
    device: int = 0

    @staticmethod
    def of(region: Region) -> MemoryRange:
        """The registered extent of a region."""
        return MemoryRange(region.address, region.extent_bytes, region.memory, region.device)


@dataclass(frozen=True)
class Registration:
    """Memory known to NIXL; keep it to deregister."""

    handles: tuple[Any, ...]


@dataclass
class Rows:
    """A prepared list of strided descriptor rows."""

    handle: Any = field(repr=False)


@dataclass
class Transfer:
    """One READ. It cannot be stopped: what it may write is reusable only after `Agent.release`
    returned True, which is when it has ended.

    Attributes:
        error: why it failed; "" while it has not.
    """

    handle: Any = field(repr=False)
    state: TransferState = "active"
    error: str = ""
    released: bool = False


@dataclass(frozen=True)
class Telemetry:
    """What NIXL counted for one completed READ.

    Attributes:
        num_descriptors: descriptors after NIXL merged neighbours.
        num_bytes: bytes read.
        post_seconds: time the posting call took.
        transfer_seconds: time from posting to completion, including `post_seconds`.
    """

    num_descriptors: int
    num_bytes: int
    post_seconds: float
    transfer_seconds: float


class Agent:
    """One NIXL agent: registers memory, knows peers, reads from them.

    Args:
        native: a NIXL agent, such as the one of vLLM's worker; `Agent.create` makes one.
    """

    def __init__(self, native: Any) -> None:
        self._native = native
        self._errors = _native_errors(sys.modules[type(native).__module__])

    @classmethod
    def create(
        cls,
        name: str,
        *,
        backends: Sequence[str] = ("UCX",),
        num_threads: int = 0,
        telemetry: bool = True,
        verbose: bool = False,
    ) -> Agent:
        """Start a NIXL agent.

        Args:
            name: unique among the agents that will meet.
            backends: NIXL backends to start.
            num_threads: NIXL's own threads, which share the descriptors of a long READ; with 0 the
                caller's posts them all. vLLM's connector has 4 (its key ``num_threads``).
            telemetry: let NIXL count descriptors and time per transfer.
            verbose: keep NIXL's INFO messages (``NIXL_LOG_LEVEL`` in the environment wins).

        Raises:
            MissingDependencyError: NIXL is not installed or does not load.
            TransferError: the agent or a backend cannot be started.
        """
        api = _load()
        if not verbose and "NIXL_LOG_LEVEL" not in os.environ:
            logging.getLogger("nixl").setLevel(logging.WARNING)
        with _translated("create", _native_errors(api)):
            # Handshakes run beside the thread that polls.
            config = api.nixl_agent_config(
                backends=list(backends),
                num_threads=num_threads,
                capture_telemetry=telemetry,
                sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
            )
            native = api.nixl_agent(name, config)
        # NIXL only warns about a backend whose plugin is missing; without one nothing can be read.
        missing = [backend for backend in backends if backend not in native.backends]
        if missing:
            raise TransferError(
                f"NIXL has no plugin for {', '.join(missing)}",
                code="backend-missing",
                field="backends",
                got=", ".join(native.plugin_list),
                expected=", ".join(backends),
            )
        return cls(native)

    @property
    def name(self) -> str:
        """The agent's name, which peers see."""
        return str(self._native.name)

    def register(self, ranges: Iterable[MemoryRange]) -> Registration:
        """Make memory readable by peers and writable by our own READs.

        Raises:
            TransferError: a backend refused; nothing of the call stays registered.
        """
        by_memory: dict[Memory, list[tuple[int, int, int, str]]] = {}
        for item in ranges:
            rows = by_memory.setdefault(item.memory, [])
            rows.append((item.address, item.num_bytes, item.device, ""))
        handles: list[Any] = []
        try:
            for memory, rows in by_memory.items():
                with self._calling("register"):
                    handles.append(self._native.register_memory(rows, _MEMORY_NAMES[memory]))
        except TransferError:
            self.deregister(Registration(tuple(handles)))
            raise
        return Registration(tuple(handles))

    def deregister(self, registration: Registration) -> None:
        """Forget registered memory. Raises `TransferError` when NIXL refuses."""
        for handle in registration.handles:
            with self._calling("deregister"):
                self._native.deregister_memory(handle)

    def metadata(self) -> bytes:
        """What a peer needs to reach this agent and its registered memory."""
        with self._calling("metadata"):
            return bytes(self._native.get_agent_metadata())

    def add_peer(self, metadata: bytes) -> AgentName:
        """Load a peer's metadata and return its agent's name. Raises `TransferError`."""
        with self._calling("add_peer"):
            name: AgentName = self._native.add_remote_agent(metadata)
        return name

    def remove_peer(self, peer: AgentName) -> None:
        """Forget a peer and disconnect. Raises `TransferError`."""
        with self._calling("remove_peer"):
            self._native.remove_remote_agent(peer)

    def knows_peer(self, peer: AgentName) -> bool:
        """Whether a peer's metadata is loaded."""
        with self._calling("knows_peer"):
            return bool(self._native.check_remote_metadata(peer))

    def prepare_local(self, rows: NDArray[np.uint64], memory: Memory) -> Rows:
        """Prepare rows [R, 5] (address, bytes, device, stride, count) of our own registered memory.

        Raises:
            TransferError: a row lies outside registered memory.
        """
        return self._prepare("NIXL_INIT_AGENT", rows, memory)

    def prepare_remote(self, peer: AgentName, rows: NDArray[np.uint64], memory: Memory) -> Rows:
        """Prepare rows [R, 5] of a peer's registered memory. Raises as `prepare_local`."""
        return self._prepare(peer, rows, memory)

    def release_rows(self, rows: Rows) -> None:
        """Free prepared rows. Transfers made from them are not affected."""
        with self._calling("release_rows"):
            self._native.release_dlist_handle(rows.handle)

    def read(
        self,
        local: Rows,
        local_ids: NDArray[np.int32],
        remote: Rows,
        remote_ids: NDArray[np.int32],
    ) -> Transfer:
        """Post one READ of descriptor ids [M] on both sides; id i lands at id i.

        A READ that fails while it is posted comes back as a failed transfer: it may have been
        posted in part, so its memory has to be released like that of any other.

        Raises:
            TransferError: NIXL did not accept the request; nothing was posted.
        """
        with self._calling("read"):
            handle = self._native.make_prepped_xfer(
                "READ", local.handle, local_ids, remote.handle, remote_ids
            )
        transfer = Transfer(handle)
        try:
            with self._calling("post"):
                self._note(transfer, self._native.transfer(handle))
        except Exception as error:
            # Whatever it is: without its handle nobody could ever tell when this READ ends.
            transfer.state, transfer.error = "failed", str(error)
        return transfer

    def poll(self, transfer: Transfer) -> TransferState:
        """The state now. "done" and "failed" are final; a failed READ may still be writing."""
        if transfer.state == "active":
            try:
                with self._calling("poll"):
                    self._note(transfer, self._native.check_xfer_state(transfer.handle))
            except TransferError as error:
                transfer.state, transfer.error = "failed", str(error)
        return transfer.state

    def release(self, transfer: Transfer) -> bool:
        """Free the handle of a READ that has ended. False: it has not, or NIXL will not; ask again.

        NIXL takes the handle of an active READ back as well, and UCX goes on writing: nothing
        would ever tell when it stops.
        """
        if not transfer.released:
            if self.poll(transfer) == "active":
                return False
            try:
                with self._calling("release"):
                    self._native.release_xfer_handle(transfer.handle)
            except TransferError:
                return False
            transfer.released = True
        return True

    def telemetry(self, transfer: Transfer) -> Telemetry | None:
        """What NIXL counted for a completed, unreleased READ; None when it counts nothing."""
        try:
            with self._calling("telemetry"):
                counted = self._native.get_xfer_telemetry(transfer.handle)
        except TransferError:
            return None
        return Telemetry(
            num_descriptors=int(counted.descCount),
            num_bytes=int(counted.totalBytes),
            post_seconds=_microseconds(counted.postDuration) * 1e-6,
            transfer_seconds=_microseconds(counted.xferDuration) * 1e-6,
        )

    def notify(self, peer: AgentName, text: bytes) -> None:
        """Send a notice to a peer. Raises `TransferError` when it cannot be sent."""
        with self._calling("notify"):
            self._native.send_notif(peer, text)

    def notices(self) -> dict[str, list[bytes]]:
        """Notices that came since the last call, by the sender's agent name."""
        with self._calling("notices"):
            return dict(self._native.get_new_notifs())

    def close(self) -> None:
        """Let go of the native agent, which is destroyed when nobody else holds it.

        Until then its progress thread takes a whole core.
        """
        self._native = None

    def _prepare(self, peer: AgentName, rows: NDArray[np.uint64], memory: Memory) -> Rows:
        with self._calling("prepare"):
            return Rows(self._native.prep_xfer_dlist(peer, rows, _MEMORY_NAMES[memory]))

    def _note(self, transfer: Transfer, answer: str) -> None:
        if answer == "DONE":
            transfer.state = "done"
        elif answer != "PROC":
            transfer.state, transfer.error = "failed", f"NIXL reports {answer}"

    def _calling(self, operation: str) -> AbstractContextManager[None]:
        if self._native is None:
            raise TransferError("the agent is closed", code="closed", field=operation)
        return _translated(operation, self._errors)


@contextmanager
def _translated(operation: str, errors: tuple[type[Exception], ...]) -> Iterator[None]:
    try:
        yield
    except errors as error:
        raise TransferError(
            f"NIXL {operation}: {error}", code="nixl", field=operation, got=error
        ) from error


def _load() -> Any:
    """The first NIXL Python interface that is installed."""
    reasons = []
    for name in _MODULES:
        try:
            return importlib.import_module(name)
        except ImportError as error:
            reasons.append(f"{name}: {error}")
    raise MissingDependencyError(
        f"NIXL is needed; install kvpd[nixl] ({'; '.join(reasons)})",
        code="missing-dependency",
        field="nixl",
        got="; ".join(reasons),
        expected="kvpd[nixl]",
    )


def _native_errors(api: Any) -> tuple[type[Exception], ...]:
    """NIXL's exception classes, which share no base of their own."""
    bindings = vars(api.nixlBind)
    return (
        RuntimeError,
        *(
            kind
            for kind in bindings.values()
            if isinstance(kind, type) and issubclass(kind, Exception)
        ),
    )


def _microseconds(value: Any) -> float:
    # Integer microseconds in NIXL 1.5, a timedelta in other builds.
    seconds = getattr(value, "total_seconds", None)
    return float(value) if seconds is None else float(seconds()) * 1e6
