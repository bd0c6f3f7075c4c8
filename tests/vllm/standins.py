"""Stand-ins for what vLLM's Python imports and a machine without its accelerators does not have.

`install()` comes before the first backend is imported. Nothing here computes: a stand-in is there
to be imported, subclassed and named, so that classes can be asked what they declare.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

# Vendors' packages, and vLLM's own package around compiled modules that no build for CPUs has.
PACKAGES = (
    "aiter",
    "cutlass",
    "deep_gemm",
    "flash_attn",
    "flashinfer",
    "quack",
    "torchvision",
    "vllm._C_stable_libtorch",
    "vllm.third_party.deep_gemm",
    "vllm.vllm_flash_attn",
    "vllm_xpu_kernels",
)


class StandInType(type):
    """A class that has every attribute, so that what subclasses or decorates with it imports."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn

    def __getitem__(cls, key: Any) -> Any:
        return cls


class StandIn(metaclass=StandInType):
    """In place of anything imported from a package that is not here."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) else StandIn()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn


class StandInModule(ModuleType):
    """In place of a module that is not here."""

    __version__ = "0.0.0"

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn


class StandInFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `PACKAGES` and everything below them."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if any(fullname == name or fullname.startswith(f"{name}.") for name in PACKAGES):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return StandInModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def install() -> None:
    """Make every module of vLLM's attention backends importable on this machine."""
    # Before the stand-in of torchvision: transformers asks what is there and believes the answer.
    import torch
    import transformers  # noqa: F401
    from transformers.utils import import_utils

    import_utils.is_torchvision_available()
    sys.meta_path.insert(0, StandInFinder())
    # vLLM's ROCm module asks for the device's name when it is imported.
    device = SimpleNamespace(
        name="stand-in", gcnArchName="gfx942", major=9, minor=4, multi_processor_count=1
    )
    torch.cuda.get_device_properties = lambda *args, **kwargs: device  # type: ignore[assignment]
    # And its CUTLASS module takes a workspace.
    real_empty = torch.empty

    def empty(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "meta"
        return real_empty(*args, **kwargs)

    torch.empty = empty
    # With its package seemingly there, vLLM would ask a server for FlashInfer's kernels.
    from vllm.utils import flashinfer

    flashinfer.has_nvidia_artifactory = lambda: False
    # Builds for several vendors register operators under one name; here both are imported.
    from vllm.utils import torch_utils

    register = torch_utils.direct_register_custom_op

    def register_once(*args: Any, **kwargs: Any) -> None:
        with contextlib.suppress(RuntimeError):
            register(*args, **kwargs)

    torch_utils.direct_register_custom_op = register_once
    # Without a driver vLLM puts a placeholder in Triton's place, which lacks some names.
    from vllm.triton_utils import importing

    importing.TritonLanguagePlaceholder.__getattr__ = StandInModule.__getattr__
    # What this module imports depends on the platform; on CPUs it is nothing.
    from vllm.v1.attention.backends import fa_utils

    for name in ("flash_attn_varlen_func", "compile_flash_attn_varlen_func_from_specs",
                 "get_scheduler_metadata", "reshape_and_cache_flash"):  # fmt: skip
        if not hasattr(fa_utils, name):
            setattr(fa_utils, name, StandIn())
