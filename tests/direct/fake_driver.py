"""A stand-in for the CUDA driver: allocations are files in shared memory, mapped for real.

The only fake of these tests. Addresses, offsets and extents are true, and the bytes are shared
between processes, so whatever follows the driver's answers runs as it would on a GPU.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvpd.direct.driver import HANDLE_BYTES, Extent, MemoryHandle
from kvpd.errors import DirectError

if TYPE_CHECKING:
    import torch

SHARED = Path("/dev/shm")
UUIDS = tuple(f"GPU-00000000-0000-4000-8000-{number:012x}" for number in range(3))


def prefix(pid: int) -> str:
    """Begins the names of a process's files."""
    return f"kvpd-fake-{pid}-"


def remove_left_by(pid: int) -> None:
    """The files of a process that ended without `FakeDriver.free`."""
    for left in SHARED.glob(f"{prefix(pid)}*"):
        left.unlink()


@dataclass
class FakeDriver:
    """Devices are those of `uuids`; `unreachable` are pairs without peer access."""

    uuids: tuple[str, ...] = UUIDS[:1]
    unreachable: frozenset[tuple[int, int]] = frozenset()
    fail_open_after: int | None = None
    names: dict[int, str] = field(default_factory=dict)
    memory: dict[int, Any] = field(default_factory=dict, repr=False)
    num_open: int = 0
    calls: list[str] = field(default_factory=list)

    def allocate(self, num_bytes: int) -> Extent:
        """Shared memory of this process."""
        name = f"{prefix(os.getpid())}{secrets.token_hex(12)}"
        with open(SHARED / name, "xb+") as file:
            file.truncate(num_bytes)
            extent = self._map(file.fileno(), num_bytes)
        self.names[extent.address] = name
        return extent

    def free(self) -> None:
        """Remove the files; what is mapped stays so."""
        for name in self.names.values():
            (SHARED / name).unlink(missing_ok=True)

    def bytes_of(self, extent: Extent) -> NDArray[np.uint8]:
        """uint8 [num_bytes]: the memory itself."""
        return np.frombuffer(self.memory[extent.address], dtype=np.uint8)

    def torch_device(self, device: int) -> torch.device:
        import torch

        return torch.device("cpu")

    def device_uuid(self, device: int) -> str:
        return self.uuids[device]

    def find_device(self, uuid: str) -> int | None:
        return self.uuids.index(uuid) if uuid in self.uuids else None

    def can_access_peer(self, device: int, peer: int) -> bool:
        return (device, peer) not in self.unreachable

    def allocation_of(self, address: int, device: int) -> Extent:
        for base in self.names:
            extent = Extent(base, len(self.memory[base]))
            if extent.address <= address < extent.end:
                return extent
        raise DirectError("no allocation", code="driver", field="cuMemGetAddressRange")

    def export(self, allocation: Extent, device: int) -> MemoryHandle:
        return MemoryHandle(self.names[allocation.address].encode().ljust(HANDLE_BYTES, b"\0"))

    def open(self, handle: MemoryHandle, device: int) -> Extent:
        if self.num_open == self.fail_open_after:
            raise DirectError("out of memory", code="driver", field="cuIpcOpenMemHandle")
        name = handle.reveal().rstrip(b"\0").decode()
        descriptor = os.open(SHARED / name, os.O_RDWR)
        try:
            extent = self._map(descriptor, os.fstat(descriptor).st_size)
        finally:
            os.close(descriptor)
        self.num_open += 1
        self.calls.append(f"open {extent.num_bytes}")
        return extent

    def close(self, mapped: Extent, device: int) -> None:
        self.num_open -= 1
        self.calls.append(f"close {mapped.num_bytes}")

    def _map(self, descriptor: int, num_bytes: int) -> Extent:
        memory = mmap.mmap(descriptor, num_bytes)
        extent = Extent(ctypes.addressof(ctypes.c_char.from_buffer(memory)), num_bytes)
        self.memory[extent.address] = memory
        return extent
