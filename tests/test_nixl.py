"""The adapter against real NIXL: two processes, UCX, every byte around the rows guarded."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest

pytest.importorskip("nixl")

import kvpd.nixl
from kvpd.errors import MissingDependencyError, TransferError
from kvpd.nixl import Agent, MemoryRange, Transfer

STRIDE, LENGTH, COUNT = 96, 64, 32
POISON = 0x5C


def peer_memory() -> np.ndarray[Any, np.dtype[np.uint8]]:
    """What the peer holds: known in both processes, no two rows alike."""
    return np.random.default_rng(7).integers(0, 256, size=2 * STRIDE * COUNT, dtype=np.uint8)


def peer(pipe: Connection) -> None:
    """The other process: registered memory, its notices sent back on request."""
    memory = peer_memory()
    agent = Agent.create(f"nixl-test-peer-{time.time_ns()}")
    agent.register([MemoryRange(int(memory.ctypes.data), memory.size)])
    pipe.send((agent.name, agent.metadata(), int(memory.ctypes.data)))
    while pipe.recv() == "notices":
        came: dict[str, list[bytes]] = {}
        give_up_at = time.monotonic() + 30
        while not came and time.monotonic() < give_up_at:
            came = agent.notices()
        pipe.send(came)


@dataclass
class Remote:
    """The peer's process, as seen from here."""

    process: Any
    pipe: Connection
    name: str
    metadata: bytes
    address: int

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


def start_peer() -> Remote:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=peer, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    return Remote(process, ours, *ours.recv())


@pytest.fixture
def remote() -> Iterator[Remote]:
    started = start_peer()
    yield started
    started.kill()


@pytest.fixture
def agent() -> Iterator[Agent]:
    created = Agent.create(f"nixl-test-{time.time_ns()}")
    yield created
    created.close()


def rows(address: int, *, stride: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Two rows of COUNT descriptors: the first half of the memory, and the second."""
    half = STRIDE * COUNT
    return np.array(
        [[address + half * row, LENGTH, 0, stride, COUNT] for row in range(2)], dtype=np.uint64
    )


def finish(agent: Agent, transfer: Transfer) -> str:
    give_up_at = time.monotonic() + 20
    while agent.poll(transfer) == "active" and time.monotonic() < give_up_at:
        pass
    return transfer.state


def expected(ids: list[int], stride: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Poison but for the descriptors read, each at its own place."""
    memory = np.full(2 * STRIDE * COUNT, POISON, dtype=np.uint8)
    source = peer_memory()
    for index in ids:
        row, block = divmod(index, COUNT)
        at = row * STRIDE * COUNT + block * stride
        memory[at : at + LENGTH] = source[at : at + LENGTH]
    return memory


@pytest.mark.parametrize(
    ("stride", "ids", "num_merged"),
    [
        (STRIDE, [3, 4, 5, 40, 9], 5),  # a stride above the length: nothing merges
        (LENGTH, [3, 4, 5, 40, 9], 3),
        (LENGTH, list(range(10, 20)), 1),
        (LENGTH, [20, 19, 18], 3),
        (LENGTH, [31, 32], 2),  # the last of one row and the first of the next
    ],
)
def test_read(agent: Agent, remote: Remote, stride: int, ids: list[int], num_merged: int) -> None:
    memory = np.full(2 * STRIDE * COUNT, POISON, dtype=np.uint8)
    registration = agent.register([MemoryRange(int(memory.ctypes.data), memory.size)])
    name = agent.add_peer(remote.metadata)
    assert name == remote.name.encode(), "not as NIXL returned it"
    assert agent.knows_peer(name) and not agent.knows_peer("somebody else")
    ours = agent.prepare_local(rows(int(memory.ctypes.data), stride=stride), "dram")
    theirs = agent.prepare_remote(name, rows(remote.address, stride=stride), "dram")
    index = np.array(ids, dtype=np.int32)
    transfer = agent.read(ours, index, theirs, index)
    assert finish(agent, transfer) == "done"
    counted = agent.telemetry(transfer)
    assert counted is not None
    assert (counted.num_descriptors, counted.num_bytes) == (num_merged, LENGTH * len(ids))
    assert 0 < counted.transfer_seconds < 20
    assert agent.release(transfer) and agent.release(transfer)
    assert (memory == expected(ids, stride)).all()
    agent.notify(name, b"all read")
    remote.pipe.send("notices")
    assert remote.pipe.recv() == {agent.name: [b"all read"]}
    agent.release_rows(ours)
    agent.release_rows(theirs)
    agent.remove_peer(name)
    assert not agent.knows_peer(name)
    agent.deregister(registration)


def test_a_peer_that_died(agent: Agent, remote: Remote) -> None:
    """Every call on a dead peer gives a failed transfer or a `TransferError`, in finite time."""
    memory = np.full(2 * STRIDE * COUNT, POISON, dtype=np.uint8)
    agent.register([MemoryRange(int(memory.ctypes.data), memory.size)])
    name = agent.add_peer(remote.metadata)
    ours = agent.prepare_local(rows(int(memory.ctypes.data), stride=STRIDE), "dram")
    theirs = agent.prepare_remote(name, rows(remote.address, stride=STRIDE), "dram")
    index = np.arange(COUNT, dtype=np.int32)
    assert finish(agent, agent.read(ours, index, theirs, index)) == "done"
    remote.kill()
    give_up_at = time.monotonic() + 20
    while time.monotonic() < give_up_at:
        try:
            transfer = agent.read(ours, index, theirs, index)
        except TransferError as error:
            assert error.code == "nixl"
            return
        if finish(agent, transfer) == "failed":
            assert transfer.error
            assert agent.release(transfer)
            return
    pytest.fail("a dead peer was read for 20 seconds")


def test_a_read_that_has_not_ended_is_not_released(monkeypatch: pytest.MonkeyPatch) -> None:
    """NIXL would release it, and UCX go on writing into memory that is somebody else's by then."""
    # Over TCP a stopped process answers nothing; other transports read its memory without it.
    monkeypatch.setenv("UCX_TLS", "tcp")
    remote = start_peer()
    agent = Agent.create(f"nixl-test-tcp-{time.time_ns()}")
    try:
        memory = np.full(2 * STRIDE * COUNT, POISON, dtype=np.uint8)
        agent.register([MemoryRange(int(memory.ctypes.data), memory.size)])
        name = agent.add_peer(remote.metadata)
        ours = agent.prepare_local(rows(int(memory.ctypes.data), stride=STRIDE), "dram")
        theirs = agent.prepare_remote(name, rows(remote.address, stride=STRIDE), "dram")
        first, index = np.zeros(1, dtype=np.int32), np.arange(2 * COUNT, dtype=np.int32)
        assert finish(agent, agent.read(ours, first, theirs, first)) == "done"
        os.kill(remote.process.pid, signal.SIGSTOP)
        os.waitpid(remote.process.pid, os.WUNTRACED)  # until all of its threads stand
        transfer = agent.read(ours, index, theirs, index)
        assert not agent.release(transfer) and not transfer.released
        assert (memory == expected([0], STRIDE)).all()
        os.kill(remote.process.pid, signal.SIGCONT)
        assert finish(agent, transfer) == "done"
        assert agent.release(transfer) and transfer.released
        assert (memory == expected(index.tolist(), STRIDE)).all()
    finally:
        remote.kill()
        agent.close()


def test_what_nixl_refuses_is_a_transfer_error(agent: Agent, remote: Remote) -> None:
    memory = np.zeros(2 * STRIDE * COUNT, dtype=np.uint8)
    address = int(memory.ctypes.data)
    agent.register([MemoryRange(address, memory.size)])
    name = agent.add_peer(remote.metadata)
    ours = agent.prepare_local(rows(address, stride=STRIDE), "dram")
    theirs = agent.prepare_remote(name, rows(remote.address, stride=STRIDE), "dram")
    beyond = np.array([2 * COUNT], dtype=np.int32)
    for call in (
        lambda: agent.add_peer(b"no metadata"),
        lambda: agent.notify("nobody", b"x"),
        lambda: agent.prepare_local(rows(address + memory.size, stride=STRIDE), "dram"),
        lambda: agent.prepare_remote(name, rows(remote.address + 64, stride=STRIDE), "dram"),
        lambda: agent.prepare_remote("nobody", rows(remote.address, stride=STRIDE), "dram"),
        lambda: agent.read(ours, beyond, theirs, beyond),
        lambda: Agent.create("no such backend", backends=["NO_SUCH_PLUGIN"]),
    ):
        with pytest.raises(TransferError) as caught:
            call()
        assert caught.value.code in ("nixl", "backend-missing")
        assert caught.value.field


def test_a_release_that_nixl_refuses_is_not_taken_for_one(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory would be reused under a READ that still writes it."""
    (refusal,) = [kind for kind in agent._errors if kind.__name__ == "nixlRepostActiveError"]
    calls = []

    def refuse(handle: object) -> None:
        calls.append(handle)
        if len(calls) <= 2:
            raise refusal("still active")

    monkeypatch.setattr(agent._native, "release_xfer_handle", refuse)
    transfer = Transfer(handle="a handle", state="done")
    assert not agent.release(transfer) and not agent.release(transfer)
    assert not transfer.released
    assert agent.release(transfer) and transfer.released
    assert agent.release(transfer) and len(calls) == 3, "a handle is released once"


def test_a_closed_agent_says_so() -> None:
    agent = Agent.create(f"nixl-test-closed-{time.time_ns()}")
    agent.close()
    for call in (agent.metadata, agent.notices, lambda: agent.knows_peer("x")):
        with pytest.raises(TransferError) as caught:
            call()
        assert caught.value.code == "closed"


def test_nixl_missing_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvpd.nixl, "_MODULES", ("no_such_nixl._api", "nor_this._api"))
    with pytest.raises(MissingDependencyError) as caught:
        Agent.create("never")
    assert "kvpd[nixl]" in str(caught.value) and caught.value.expected == "kvpd[nixl]"
    assert "no_such_nixl" in caught.value.got and "nor_this" in caught.value.got


@pytest.mark.parametrize("verbose", [False, True])
def test_nixl_is_silent_unless_asked(verbose: bool) -> None:
    code = f"from kvpd.nixl import Agent; Agent.create('quiet', verbose={verbose})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ("INFO" in done.stdout + done.stderr) == verbose


def test_a_foreign_agent_can_be_used(agent: Agent) -> None:
    adopted = Agent(agent._native)
    assert adopted.name == agent.name
    with pytest.raises(TransferError):
        adopted.add_peer(b"no metadata")
