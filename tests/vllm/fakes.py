"""Fakes that stand between a decoder and real NIXL, to make rare timings happen on purpose.

`ControlledReads` passes every call on. Reads on the test bed end at once, so it can withhold the
news of their end, report them failed, or refuse to release their handle.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from nixl._api import nixl_agent, nixlBind


class ControlledReads:
    """Stands in for a NIXL agent.

    Attributes:
        withhold: completed reads look as if they were still running.
        fail: running reads look failed.
        refuse_release: handles cannot be released yet.
        released: how many handles were.
        polls: how often the state of a read was asked for.
        refusals: how often a handle was not released.
    """

    def __init__(self, native: Any) -> None:
        self._native = native
        self.withhold = False
        self.fail = False
        self.refuse_release = False
        self.released = 0
        self.polls = 0
        self.refusals = 0
        self.notices: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._native, name)

    def transfer(self, handle: Any) -> str:
        answer = str(self._native.transfer(handle))
        return "PROC" if self.withhold or self.fail else answer

    def check_xfer_state(self, handle: Any) -> str:
        self.polls += 1
        answer = str(self._native.check_xfer_state(handle))
        if self.fail:
            return "ERR"
        return "PROC" if self.withhold else answer

    def release_xfer_handle(self, handle: Any) -> None:
        if self.refuse_release:
            self.refusals += 1
            raise RuntimeError("refused by the test")
        self._native.release_xfer_handle(handle)
        self.released += 1

    def send_notif(self, agent: Any, notif_msg: bytes) -> None:
        if not notif_msg.startswith(b"HB:"):
            self.notices.append(bytes(notif_msg))
        self._native.send_notif(agent, notif_msg)


def install(worker: Any) -> ControlledReads:
    """Put one before the link's agent of a kvpd worker, and keep it as `worker.fake`."""
    agent = worker._link._receiver._agent
    fake = ControlledReads(agent._native)
    worker.fake = agent._native = fake
    return fake


class FakeLostHeartbeats:
    """Stands in for a worker's NIXL agent over which no heartbeat can be sent."""

    def __init__(self, native: Any) -> None:
        self._native = native

    def __getattr__(self, name: str) -> Any:
        return getattr(self._native, name)

    def send_notif(self, agent: Any, notif_msg: bytes) -> None:
        if notif_msg.startswith(b"HB:"):
            raise RuntimeError("lost by the test")
        self._native.send_notif(agent, notif_msg)


def lose_heartbeats(worker: Any) -> None:
    """From now on none is sent."""
    worker.nixl_wrapper = FakeLostHeartbeats(worker.nixl_wrapper)


class FakeLostConnection:
    """Stands in for a NIXL agent that has lost its connection to the peers that it knows now.

    As with a real one, NIXL goes on to know them, and only loading a peer anew connects again.
    """

    def __init__(self, native: Any) -> None:
        self._native = native
        self._is_lost = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._native, name)

    def add_remote_agent(self, metadata: bytes) -> Any:
        self._is_lost = False
        return self._native.add_remote_agent(metadata)

    def transfer(self, handle: Any) -> str:
        if self._is_lost:
            raise nixlBind.nixlRemoteDisconnectError("lost by the test")
        return str(self._native.transfer(handle))

    def send_notif(self, agent: Any, notif_msg: bytes) -> None:
        if self._is_lost:
            raise nixlBind.nixlRemoteDisconnectError("lost by the test")
        self._native.send_notif(agent, notif_msg)


def lose_connections(worker: Any) -> None:
    """Those of a kvpd worker, on the link's way as well as on stock's."""
    fake = FakeLostConnection(worker.nixl_wrapper)
    worker.nixl_wrapper = fake
    if worker._link._receiver is not None:
        worker._link._receiver._agent._native = fake


class RecordedAgent:
    """A NIXL agent that notes what was asked of it, and what failed; answers are the real ones.

    What differs between two runs without meaning anything is left out: addresses are counted from
    the lowest of their list, handles and agents are numbered, polls are not noted.
    """

    NAMED = ("add_remote_agent", "make_prepped_xfer", "prep_xfer_dlist")
    POLLS = ("check_xfer_state", "get_new_notifs", "get_xfer_telemetry")

    def __init__(self, *arguments: Any) -> None:
        self._native = nixl_agent(*arguments)
        self._names: dict[Any, str] = {}
        self.calls: list[list[Any]] = []

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._native, name)
        if not callable(value) or name in self.POLLS:
            return value
        return self._recorder(name, value)

    def _recorder(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(*arguments: Any, **options: Any) -> Any:
            noted = [self._plain(item) for item in arguments]
            noted += [[key, self._plain(item)] for key, item in sorted(options.items())]
            self.calls.append([name, *noted])
            try:
                answer = call(*arguments, **options)
            except Exception as error:
                self.calls[-1].append(f"raised {type(error).__name__}")
                raise
            if name in self.NAMED:
                # Overwritten, never kept: a handle may come back at the address of a freed one.
                count = sum(call[0] == name for call in self.calls)
                self._names[_key(answer)] = f"{name}#{count}"
            return answer

        return recorded

    def _plain(self, item: Any) -> Any:
        if isinstance(item, bytes) and item in self._names:
            return self._names[item]
        if isinstance(item, bytes):
            # A notice is "<request id>:<consumers>" or "HB:<request ids>"; the rest is NIXL's own.
            if item.startswith(b"HB:"):
                return "HB:"
            return "notice" + item[-2:].decode() if item[-2:-1] == b":" else "bytes"
        if isinstance(item, np.ndarray) and item.ndim == 2:
            relative = item.copy()
            relative[:, 0] -= relative[:, 0].min()
            return relative.tolist()
        if isinstance(item, np.ndarray):
            return item.tolist()
        if isinstance(item, list) and item and isinstance(item[0], tuple):
            first = min(row[0] for row in item)
            return [[row[0] - first, *row[1:]] for row in item]
        if _key(item) in self._names:
            return self._names[_key(item)]
        return item if isinstance(item, (str, int, bool, list, type(None))) else "object"


def _key(item: Any) -> Any:
    return item if isinstance(item, (str, bytes, int)) else id(item)


def record_all() -> None:
    """Let every agent that vLLM makes from now on be a recorded one."""
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker

    base_worker.NixlWrapper = RecordedAgent
