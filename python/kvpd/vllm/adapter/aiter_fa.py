"""AITER FA with kvpd's writers for its shuffled pages."""

from __future__ import annotations

from typing import Any

from vllm import __version__ as vllm_version
from vllm import envs
from vllm._aiter_ops import rocm_aiter_ops
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.attention.backends.rocm_aiter_fa import (
    AiterFlashAttentionBackend,
    AiterFlashAttentionImpl,
)

from kvpd._kvpd import __version__
from kvpd.vllm.adapter.fused_writers import FusedWriters
from kvpd.vllm.plugin import SWITCH
from kvpd.vllm.versions import check_vllm, public_release

# Up to 0.32 vLLM keeps 8-bit shuffled pages unscaled, whatever the scales of a layer are.
_HAS_SCALES = public_release(vllm_version).split(".")[:2] not in (
    ["0", "30"],
    ["0", "31"],
    ["0", "32"],
)


class FusedAiterFlashAttentionImpl(FusedWriters, AiterFlashAttentionImpl):
    """Shuffled pages are kvpd's, packed ones AITER's own as before."""

    kvpd_backend = AiterFlashAttentionBackend

    def kvpd_writes(self) -> bool:
        """Only with the switch for shuffled pages: AITER has fused writers for packed ones.

        Of 8-bit floats only where vLLM's own writer scales them, as its readers expect then.
        """
        if not rocm_aiter_ops.is_shuffle_kv_cache_enabled():
            return False
        return (self.kv_cache_dtype == "auto" or _HAS_SCALES) and super().kvpd_writes()


class FusedAiterFlashAttentionBackend(AiterFlashAttentionBackend):
    """The same pages and kernels, other writers."""

    @staticmethod
    def get_impl_cls() -> type[Any]:
        return FusedAiterFlashAttentionImpl

    @classmethod
    def full_cls_name(cls) -> tuple[str, str]:
        """The backend whose pages these are: tags and tables go by it."""
        name: tuple[str, str] = AiterFlashAttentionBackend.full_cls_name()
        return name


def register() -> None:
    """Put the backend in AITER FA's place, and the switch into the keys of compiled graphs.

    A graph compiled with the switch on calls a hook that AITER FA alone answers for packed pages
    only: taken from vLLM's cache with the switch off, it would write shuffled pages wrong.

    Raises:
        KvpdError: this vLLM is not one that kvpd was tried on.
    """
    check_vllm(vllm_version)
    name = FusedAiterFlashAttentionBackend
    register_backend(AttentionBackendEnum.ROCM_AITER_FA, f"{name.__module__}.{name.__qualname__}")
    envs.environment_variables[SWITCH] = lambda: f"kvpd {__version__}"
