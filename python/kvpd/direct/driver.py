"""The only importer of the CUDA driver's binding: memory handles, extents, and who reaches whom.

All failures are `DirectError`. The binding is NVIDIA's cuda-bindings, 12.x or 13.x; what is called
here has the same names in both. Contexts are the devices' primary ones, as torch uses them.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NoReturn, Protocol
from uuid import UUID

from kvpd.errors import DirectError

if TYPE_CHECKING:
    import torch

HANDLE_BYTES: Final = 64
# The driver cuts smaller allocations from blocks of this size and shares whole blocks: whoever
# opened such a handle would see what else lies in the block.
BLOCK_BYTES: Final = 2 << 20


@dataclass(frozen=True)
class Extent:
    """Bytes [address, address + num_bytes) of this process, as the driver knows them."""

    address: int
    num_bytes: int

    @property
    def end(self) -> int:
        """The first address behind it."""
        return self.address + self.num_bytes


class MemoryHandle:
    """Opens an allocation in another process. Whoever has the bytes has the memory."""

    __slots__ = ("_raw",)

    def __init__(self, raw: bytes) -> None:
        self._raw = raw

    def reveal(self) -> bytes:
        """The 64 bytes, for the channel to the one requester and for the driver."""
        return self._raw

    def __repr__(self) -> str:
        return "MemoryHandle()"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a memory handle is not pickled")


class Driver(Protocol):
    """What direct placement needs of a GPU's driver. Devices are ordinals of this process.

    Every method raises `DirectError` with the reason when the driver, or the memory, does not allow
    what is asked.
    """

    def torch_device(self, device: int) -> torch.device:
        """The device's name in torch."""

    def device_uuid(self, device: int) -> str:
        """The UUID as NVIDIA's tools print it; a MIG instance is refused."""

    def find_device(self, uuid: str) -> int | None:
        """The device with this UUID, if this process sees it."""

    def can_access_peer(self, device: int, peer: int) -> bool:
        """Whether kernels on `device` can read memory of `peer`."""

    def allocation_of(self, address: int, device: int) -> Extent:
        """The allocation that holds `address`; it is one that a handle can be had for."""

    def export(self, allocation: Extent, device: int) -> MemoryHandle:
        """The handle of an allocation."""

    def open(self, handle: MemoryHandle, device: int) -> Extent:
        """Map a handle for kernels on `device`; the extent is the mapping's, not the sender's."""

    def close(self, mapped: Extent, device: int) -> None:
        """Unmap what `open` returned."""


class CudaDriver:
    """`Driver` over cuda-bindings.

    Args:
        api: the module ``cuda.bindings.driver``.

    Raises:
        DirectError: the machine has no driver, or it does not start.
    """

    def __init__(self, api: Any) -> None:
        self._api = api
        self._contexts: dict[int, Any] = {}
        self._call("cuInit", 0)

    def torch_device(self, device: int) -> torch.device:
        import torch

        return torch.device("cuda", device)

    def device_uuid(self, device: int) -> str:
        name = bytes(self._call("cuDeviceGetName", 128, device)).rstrip(b"\0").decode()
        # The name is the one sign of an instance that is the same in CUDA 12 and 13.
        if " MIG " in name:
            raise DirectError(
                f"device {device} is a MIG instance ({name}), whose memory others cannot map",
                code="mig",
                field="device",
                got=name,
                expected="a whole GPU",
            )
        return self._uuid(device)

    def find_device(self, uuid: str) -> int | None:
        count = int(self._call("cuDeviceGetCount"))
        return next((device for device in range(count) if self._uuid(device) == uuid), None)

    def can_access_peer(self, device: int, peer: int) -> bool:
        # A GPU is no peer of itself; it reads its own memory all the same.
        return device == peer or bool(self._call("cuDeviceCanAccessPeer", device, peer))

    def allocation_of(self, address: int, device: int) -> Extent:
        with self._current(device):
            if not self._attribute("IS_LEGACY_CUDA_IPC_CAPABLE", address):
                raise DirectError(
                    f"memory at {address:#x} did not come from cudaMalloc, so no handle can be had "
                    "(expandable segments, sleep mode and memory pools allocate otherwise)",
                    code="not-exportable",
                    field="regions",
                    got=hex(address),
                    expected="memory from cudaMalloc",
                )
            # By context: of DEVICE_ORDINAL cuda-bindings (at least 13.3) returns 0 for any device.
            if self._attribute("CONTEXT", address) != int(self._contexts[device]):
                raise DirectError(
                    f"memory at {address:#x} is not of device {device}",
                    code="other-device",
                    field="device",
                    got="memory of another device",
                    expected=device,
                )
            allocation = self._range(address)
        if allocation.address % BLOCK_BYTES or allocation.num_bytes % BLOCK_BYTES:
            raise DirectError(
                f"the allocation at {allocation.address:#x} of {allocation.num_bytes} bytes does "
                f"not fill blocks of {BLOCK_BYTES} bytes: what shares its block would be shared",
                code="shared-block",
                field="regions",
                got=allocation.num_bytes,
                expected=f"a multiple of {BLOCK_BYTES}",
            )
        return allocation

    def export(self, allocation: Extent, device: int) -> MemoryHandle:
        with self._current(device):
            handle = self._call("cuIpcGetMemHandle", allocation.address)
        return MemoryHandle(ctypes.string_at(handle.getPtr(), HANDLE_BYTES))

    def open(self, handle: MemoryHandle, device: int) -> Extent:
        native = self._api.CUipcMemHandle()
        ctypes.memmove(native.getPtr(), handle.reveal(), HANDLE_BYTES)
        lazily = self._api.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        with self._current(device):
            address = int(self._call("cuIpcOpenMemHandle", native, lazily))
            try:
                mapped = self._range(address)
                # Offsets count from the allocation's base: any other start would shift every page.
                if mapped.address != address:
                    raise DirectError(
                        f"a mapping at {address:#x} begins at {mapped.address:#x}",
                        code="mapping-start",
                        field="allocations",
                        got=hex(mapped.address),
                        expected=hex(address),
                    )
            except DirectError:
                self._call("cuIpcCloseMemHandle", address)
                raise
        return mapped

    def close(self, mapped: Extent, device: int) -> None:
        with self._current(device):
            self._call("cuIpcCloseMemHandle", mapped.address)

    def _uuid(self, device: int) -> str:
        return f"GPU-{UUID(bytes=bytes(self._call('cuDeviceGetUuid', device).bytes))}"

    def _attribute(self, name: str, address: int) -> int:
        attribute = getattr(self._api.CUpointer_attribute, f"CU_POINTER_ATTRIBUTE_{name}")
        return int(self._call("cuPointerGetAttribute", attribute, address))

    def _range(self, address: int) -> Extent:
        base, num_bytes = self._call("cuMemGetAddressRange", address)
        return Extent(int(base), int(num_bytes))

    @contextmanager
    def _current(self, device: int) -> Iterator[None]:
        """Run with the device's primary context on this thread, whatever was current before."""
        if device not in self._contexts:
            # Kept: with the last reference to a context its mappings would vanish.
            self._contexts[device] = self._call("cuDevicePrimaryCtxRetain", device)
        self._call("cuCtxPushCurrent", self._contexts[device])
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent")

    def _call(self, name: str, *arguments: Any) -> Any:
        """One driver function: its one result, a tuple of several, or None."""
        try:
            status, *results = getattr(self._api, name)(*arguments)
        except RuntimeError as error:  # the binding found no driver, or one without this function
            raise DirectError(
                f"{name}: {error}", code="no-driver", field="driver", got=error, expected=name
            ) from error
        if int(status):
            raise DirectError(
                f"{name}: {status.name}",
                code="driver",
                field=name,
                got=status.name,
                expected="CUDA_SUCCESS",
            )
        return results[0] if len(results) == 1 else tuple(results) or None


def load_driver() -> Driver:
    """The driver of this machine's GPUs.

    Raises:
        DirectError: torch is built for ROCm, where direct placement has not been verified; torch or
            the binding is not installed; there is no driver.
    """
    modules = {name: _import(name) for name in ("torch", "cuda.bindings.driver")}
    if modules["torch"].version.hip is not None:
        raise DirectError(
            "direct placement has not been verified on ROCm, so it is not offered there",
            code="rocm-not-verified",
            field="runtime",
            got="rocm",
            expected="cuda",
        )
    return CudaDriver(modules["cuda.bindings.driver"])


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise DirectError(
            f"direct placement needs {name}; install kvpd[direct] ({error})",
            code="missing-dependency",
            field=name,
            got="not installed",
            expected="kvpd[direct]",
        ) from error
