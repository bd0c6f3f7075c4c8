"""How large a slab is where the operator gave no size; knows nothing of vLLM or torch."""

from __future__ import annotations

from dataclasses import dataclass

from kvpd.vllm.config import ConnectorConfig

MEBIBYTE = 1 << 20
LARGEST_BYTES = 512 * MEBIBYTE
# A slab makes requests faster; a graph that cannot be captured ends the engine.
_PART_OF_WHAT_IS_LEFT = 4
# What vLLM takes after its cache, at least. It keeps room for that inside
# `gpu_memory_utilization`, but not for graphs where VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS is
# off, and not at all where the operator gave the cache's size.
_LEAST_KEPT_BYTES = 4096 * MEBIBYTE
_LEAST_KEPT_BY_HAND_BYTES = 8192 * MEBIBYTE


@dataclass(frozen=True)
class DeviceMemory:
    """A GPU's memory when vLLM has allocated its cache and captured no graph yet.

    Attributes:
        total_bytes, free_bytes: of the device.
        taken_bytes: what the allocator of this process holds of it.
        utilization: vLLM's ``gpu_memory_utilization``; None where the operator gave the size of the
            cache, for then vLLM does not heed it.
    """

    total_bytes: int
    free_bytes: int
    taken_bytes: int
    utilization: float | None

    @property
    def kept_bytes(self) -> int:
        """Room for what vLLM takes later: graphs, activations, libraries' workspaces.

        All that it may take and its allocator has not taken yet. What this process has taken past
        the allocator counts as room too, which errs towards a smaller slab.
        """
        if self.utilization is None:
            return _LEAST_KEPT_BY_HAND_BYTES
        allowed_bytes = int(self.total_bytes * self.utilization)
        return max(allowed_bytes - self.taken_bytes, _LEAST_KEPT_BYTES)


@dataclass(frozen=True)
class SlabSize:
    """A size, and what the operator should know of it; "" where it is what was to be expected."""

    num_bytes: int
    note: str = ""


def takes_default(
    config: ConnectorConfig, *, is_reader: bool, is_on_gpu: bool, can_sleep: bool
) -> bool:
    """Whether there is a slab without `slab_bytes`.

    Asleep, its memory would be unmapped while NIXL holds it, so an engine that can sleep has none.
    """
    asked_for = config.page_format_conversion and config.slab_bytes is None
    return asked_for and is_reader and is_on_gpu and not can_sleep


def default_size(memory: DeviceMemory, page_bytes: int) -> SlabSize:
    """At most a quarter of what is left once vLLM has what it takes later.

    Args:
        page_bytes: bytes of one layer's page, which a slab has to hold.
    """
    left_bytes = max(memory.free_bytes - memory.kept_bytes, 0)
    num_bytes = min(LARGEST_BYTES, left_bytes // _PART_OF_WHAT_IS_LEFT)
    if num_bytes == LARGEST_BYTES:
        return SlabSize(num_bytes)
    why = (
        f"of {_mib(memory.free_bytes)} free, {_mib(memory.kept_bytes)} are kept for graphs and "
        f"activations, and a quarter of the rest is {_mib(num_bytes)}. Lower gpu_memory_utilization"
        " or the cache's size for a larger one, or set slab_bytes"
    )
    if num_bytes < page_bytes:
        return SlabSize(0, f"no slab, raw pages land in the cache (slower): {why}")
    return SlabSize(num_bytes, f"the slab has {_mib(num_bytes)}, not {_mib(LARGEST_BYTES)}: {why}")


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / MEBIBYTE:,.0f} MiB"
