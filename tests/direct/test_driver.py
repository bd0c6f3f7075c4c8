"""The CUDA driver's typed front: what is refused without a GPU, and a stand-in for the binding."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
import torch

from kvpd.direct import DirectError, Exporter
from kvpd.direct.driver import BLOCK_BYTES, CudaDriver, Extent, MemoryHandle, load_driver
from tests.direct.test_exporter import region

BASE = 64 * BLOCK_BYTES
UUID_BYTES = bytes(range(16))
CONTEXT = 0x55AA00


class FakeHandle:
    """64 bytes at an address, as the binding's structure."""

    def __init__(self, raw: bytes = bytes(64)) -> None:
        self.buffer = ctypes.create_string_buffer(raw, 64)

    def getPtr(self) -> int:  # noqa: N802 - the binding's name
        return ctypes.addressof(self.buffer)


class Status(int):
    """A result code with its name."""

    name = "CUDA_SUCCESS"


class Failure(Status):
    name = "CUDA_ERROR_INVALID_VALUE"


class FakeBinding:
    """cuda.bindings.driver as far as it is called; answers are set by the test."""

    CUipcMemHandle = FakeHandle
    CUipcMem_flags = SimpleNamespace(CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS=1)
    CUpointer_attribute = SimpleNamespace(
        CU_POINTER_ATTRIBUTE_CONTEXT="context",
        CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE="capable",
    )

    def __init__(self, **answers: Any) -> None:
        self.answers: dict[str, Any] = {
            "cuInit": (),
            "cuDeviceGetName": (b"NVIDIA H200\0\0",),
            "cuDeviceGetCount": (1,),
            "cuDeviceGetUuid": (SimpleNamespace(bytes=UUID_BYTES),),
            "cuDeviceCanAccessPeer": (0,),
            "cuDevicePrimaryCtxRetain": (CONTEXT,),
            "cuCtxPushCurrent": (),
            "cuCtxPopCurrent": (CONTEXT,),
            "cuMemGetAddressRange": (BASE, 4 * BLOCK_BYTES),
            "cuIpcGetMemHandle": (FakeHandle(bytes(range(64))),),
            "cuIpcOpenMemHandle": (BASE,),
            "cuIpcCloseMemHandle": (),
            "context": (CONTEXT,),
            "capable": (1,),
        } | answers
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append((name, *arguments))
            answer = self.answers[arguments[0] if name == "cuPointerGetAttribute" else name]
            if isinstance(answer, Exception):
                raise answer
            return (answer,) if isinstance(answer, Status) else (Status(0), *answer)

        return call

    def names(self) -> list[str]:
        """Functions called after the start, without contexts."""
        return [name for name, *_ in self.calls[1:] if not name.startswith(("cuCtx", "cuDevicePr"))]


def code_of(driver: CudaDriver, method: str, *arguments: Any) -> tuple[str, str]:
    with pytest.raises(DirectError) as caught:
        getattr(driver, method)(*arguments)
    return caught.value.code, caught.value.field


def test_uuid_as_the_tools_print_it() -> None:
    driver = CudaDriver(FakeBinding())
    assert driver.device_uuid(0) == "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"
    assert driver.device_uuid(0) == f"GPU-{UUID(bytes=UUID_BYTES)}"
    assert driver.find_device(driver.device_uuid(0)) == 0
    assert driver.find_device("GPU-00010203-0405-0607-0809-0a0b0c0d0e10") is None


def test_a_mig_instance_is_refused() -> None:
    driver = CudaDriver(FakeBinding(cuDeviceGetName=(b"NVIDIA H200 MIG 1g.18gb\0",)))
    assert code_of(driver, "device_uuid", 0) == ("mig", "device")


def test_a_gpu_reaches_itself_whatever_the_driver_calls_peers() -> None:
    driver = CudaDriver(FakeBinding())
    assert driver.can_access_peer(0, 0)
    assert not driver.can_access_peer(0, 1)
    assert CudaDriver(FakeBinding(cuDeviceCanAccessPeer=(1,))).can_access_peer(0, 1)


def test_only_what_cuda_malloc_gave_in_whole_blocks_is_offered() -> None:
    def refused(**answers: Any) -> str:
        return code_of(CudaDriver(FakeBinding(**answers)), "allocation_of", BASE + 5, 0)[0]

    allocation = CudaDriver(FakeBinding()).allocation_of(BASE + 5, 0)
    assert allocation == Extent(BASE, 4 * BLOCK_BYTES)
    assert refused(context=(CONTEXT + 1,)) == "other-device"
    assert refused(capable=(0,)) == "not-exportable"
    assert refused(context=Failure(1)) == "driver"
    assert refused(cuMemGetAddressRange=(BASE, 4 * BLOCK_BYTES - 512)) == "shared-block"
    assert refused(cuMemGetAddressRange=(BASE + 512, BLOCK_BYTES)) == "shared-block"


def test_a_handle_goes_in_and_out_whole() -> None:
    binding = FakeBinding()
    driver = CudaDriver(binding)
    handle = driver.export(Extent(BASE, BLOCK_BYTES), 0)
    assert handle.reveal() == bytes(range(64))
    assert driver.open(handle, 0) == Extent(BASE, 4 * BLOCK_BYTES)
    (opened,) = [call for call in binding.calls if call[0] == "cuIpcOpenMemHandle"]
    assert ctypes.string_at(opened[1].getPtr(), 64) == bytes(range(64))
    assert opened[2] == 1
    driver.close(Extent(BASE, 4 * BLOCK_BYTES), 0)
    assert binding.calls[-2] == ("cuIpcCloseMemHandle", BASE)


@pytest.mark.parametrize(
    "answers, code",
    [
        ({"cuMemGetAddressRange": (BASE - BLOCK_BYTES, 4 * BLOCK_BYTES)}, "mapping-start"),
        ({"cuMemGetAddressRange": Failure(1)}, "driver"),
    ],
)
def test_a_mapping_of_unknown_extent_is_closed_again(answers: dict[str, Any], code: str) -> None:
    binding = FakeBinding(**answers)
    assert code_of(CudaDriver(binding), "open", MemoryHandle(bytes(64)), 0)[0] == code
    assert binding.names()[-1] == "cuIpcCloseMemHandle"


def test_every_push_has_its_pop_and_the_context_is_kept() -> None:
    binding = FakeBinding()
    driver = CudaDriver(binding)
    driver.allocation_of(BASE, 0)
    driver.export(Extent(BASE, BLOCK_BYTES), 0)
    binding.answers["cuIpcOpenMemHandle"] = Failure(1)
    code_of(driver, "open", MemoryHandle(bytes(64)), 0)
    names = [name for name, *_ in binding.calls]
    assert names.count("cuCtxPushCurrent") == names.count("cuCtxPopCurrent") == 3
    assert names.count("cuDevicePrimaryCtxRetain") == 1


def test_failures_name_the_function_and_the_drivers_own_code() -> None:
    driver = CudaDriver(FakeBinding(cuIpcGetMemHandle=Failure(1)))
    with pytest.raises(DirectError) as caught:
        driver.export(Extent(BASE, BLOCK_BYTES), 0)
    assert caught.value.field == "cuIpcGetMemHandle"
    assert caught.value.got == "CUDA_ERROR_INVALID_VALUE"
    missing = RuntimeError('Function "cuIpcGetMemHandle" not found')
    driver = CudaDriver(FakeBinding(cuIpcGetMemHandle=missing))
    assert code_of(driver, "export", Extent(BASE, BLOCK_BYTES), 0)[0] == "no-driver"


def test_no_driver_on_this_machine() -> None:
    """The real binding, where there is one."""
    pytest.importorskip("cuda.bindings.driver")
    if torch.cuda.is_available():
        pytest.skip("THIS MACHINE HAS A DRIVER: ITS ABSENCE WAS NOT TRIED")
    with pytest.raises(DirectError) as caught:
        Exporter([region(4096)])
    assert caught.value.code == "no-driver"


@pytest.mark.parametrize("name", ["torch", "cuda.bindings.driver"])
def test_what_is_not_installed_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(DirectError) as caught:
        load_driver()
    assert (caught.value.code, caught.value.field) == ("missing-dependency", name)
    assert "kvpd[direct]" in str(caught.value)


def test_rocm_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cuda.bindings.driver")
    monkeypatch.setattr(torch.version, "hip", "7.0")
    with pytest.raises(DirectError) as caught:
        load_driver()
    assert caught.value.code == "rocm-not-verified"


def test_importing_needs_neither_torch_nor_the_binding() -> None:
    program = (
        "import sys, kvpd.direct, kvpd.wire;"
        "print([name for name in ('torch', 'cuda', 'nixl', 'triton') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")
