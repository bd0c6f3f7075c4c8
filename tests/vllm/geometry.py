"""What a release's own classes do with a cache's memory, and what kvpd makes of it.

``python -m tests.vllm.geometry`` prints one JSON object a case. It runs in an interpreter that has
the release's Python on its path; the compiled modules are not needed. The cache is planned and
allocated by vLLM's own code, and registered by its NIXL worker's own code; what stands in is named
`StandIn...`: the configuration, the NIXL agent, and the worker's constructor.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm import __version__ as vllm_version
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from kvpd import EngineDescription, runs
from kvpd._kvpd import TransferPlan
from kvpd.vllm.adapter.description import describe
from tests.vllm.backends import BACKENDS


def plan_cache(config: Any, groups: list[KVCacheGroupSpec]) -> Any:
    """vLLM's own plan."""
    module = importlib.import_module(PLANNING)
    return module.get_kv_cache_config_from_groups(config, groups, 1 << 30)


# vLLM 0.33 keeps the function in a module of its own.
PLANNING = "vllm.v1.core.kv_cache_planning"
if importlib.util.find_spec(PLANNING) is None:
    PLANNING = "vllm.v1.core.kv_cache_utils"
LAYERS = ("model.layers.0.attn", "model.layers.2.attn", "model.layers.10.attn")
NUM_BLOCKS = 7
LOCAL_IDS, REMOTE_IDS = [4, 1, 6], [5, 2, 3]


@dataclass(frozen=True)
class Case:
    """One cache: which backend keeps it, in which of vLLM's layouts, in which shape."""

    backend: str
    layout: str
    heads: int
    tokens: int
    head_dim: int
    dtype: str = "bfloat16"


def cases() -> Iterator[Case]:
    """Every layout; both backends; 1 to 4 heads, 16 and 32 tokens, D 64 and 128, both types."""
    for backend in ("standard", "shuffled"):
        for layout in KVCacheLayout:
            for heads, tokens, head_dim in ((1, 16, 64), (2, 16, 128), (3, 32, 64), (4, 32, 128)):
                yield Case(backend, layout.name, heads, tokens, head_dim)
    yield Case("standard", "LBHNC", 8, 16, 128, "float16")
    yield Case("shuffled", "LHBNC", 8, 16, 128, "float16")


class StandInAgent:
    """In place of NIXL's agent: keeps what it is given."""

    def __init__(self) -> None:
        self.registered: list[tuple[Any, str]] = []
        self.prepared: list[np.ndarray[Any, Any]] = []

    def get_reg_descs(self, ranges: Any, memory: str) -> Any:
        self.registered.append((ranges, memory))
        return ranges

    def register_memory(self, descs: Any, **options: Any) -> None:
        pass

    def get_agent_metadata(self) -> bytes:
        return b"stand-in"

    def get_xfer_descs(self, rows: Any, memory: str) -> Any:
        return rows

    def prep_xfer_dlist(self, agent: str, rows: Any, **options: Any) -> int:
        self.prepared.append(np.array(rows))
        return len(self.prepared)


class StandInLayer(AttentionLayerBase):
    """In place of an attention layer: it names its backend."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def get_attn_backend(self) -> Any:
        return self._backend

    def get_kv_cache_spec(self, vllm_config: Any) -> None:
        raise NotImplementedError


def stand_in_config(backend: Any, spec: Any, layout: str, dtype: torch.dtype) -> Any:
    """In place of `VllmConfig`: only what is asked of it."""
    heads, head_dim = getattr(spec, "num_kv_heads", 1), getattr(spec, "head_size", 64)
    model = SimpleNamespace(
        model="stand-in",
        dtype=dtype,
        use_mla=backend.is_mla(),
        get_total_num_kv_heads=lambda: heads,
        get_num_kv_heads=lambda parallel: heads,
        get_head_size=lambda: head_dim,
    )
    return SimpleNamespace(
        model_config=model,
        parallel_config=SimpleNamespace(),
        cache_config=SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: KVCacheLayout[layout],
            block_size=spec.block_size,
            cache_dtype="auto",
            num_gpu_blocks_override=NUM_BLOCKS,
            prefix_cache_retention_interval=None,
        ),
        attention_config=SimpleNamespace(hisparse_config=None),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=True),
        compilation_config=SimpleNamespace(
            static_forward_context={name: StandInLayer(backend) for name in LAYERS}
        ),
        speculative_config=None,
    )


class StandInWorker(NixlPullConnectorWorker):
    """Stock's worker with another constructor; what registers and describes memory is its own."""

    def __init__(self, config: Any, kv_cache_config: Any, backend: Any, layout: str) -> None:
        (group,) = kv_cache_config.kv_cache_groups
        self.vllm_config = config
        self.model_config = config.model_config
        self.kv_cache_config = kv_cache_config
        self.kv_cache_layout = layout
        self.block_size = group.kv_cache_spec.block_size
        self._layer_specs = dict.fromkeys(LAYERS, group.kv_cache_spec)
        self._group_spec_types = (type(group.kv_cache_spec),)
        self.engine_id = "stand-in"
        self.nixl_wrapper = StandInAgent()
        self.nixl_backends = ["UCX"]
        self.nixl_memory_type = "DRAM"
        self.attn_backends = [backend]
        self.backend_name = backend.get_name()
        self.num_blocks = self._logical_num_blocks = kv_cache_config.num_blocks
        self._has_packed_cache = KVCacheLayout[layout].is_block_outermost
        self.use_mla = config.model_config.use_mla
        self.kv_buffer_device = self.device_type = "cpu"
        self._mamba_ssm_size = (0, 0)
        self._physical_blocks_per_logical_kv_block = 1
        for name in ("tp_rank", "transfer_tp_rank", "device_id", "dcp_rank"):
            setattr(self, name, 0)
        for name in ("world_size", "transfer_tp_size", "dcp_size", "pcp_size", "pp_size"):
            setattr(self, name, 1)
        for name in (
            "use_host_buffer", "_has_mamba", "_is_csa_linear", "_is_hma_required",
            "_mixed_mem_types", "_uses_region_group_mapping", "_skip_dram_xfer",
        ):  # fmt: skip
            setattr(self, name, False)
        for name in (
            "region_names", "region_num_blocks", "region_group_ids", "region_mem_types",
            "_region_is_mla", "block_len_per_layer", "block_stride_per_layer",
            "_registered_descs", "region_members", "_scratch_region_indices",
        ):  # fmt: skip
            setattr(self, name, [])
        for name in (
            "host_xfer_buffers", "dst_num_blocks", "dst_region_num_blocks",
            "dst_region_group_ids", "dst_uses_region_group_mapping", "dst_region_mem_types",
            "src_xfer_handles_by_block_size", "draft_tp_mappings",
        ):  # fmt: skip
            setattr(self, name, {})
        self._head_sharded_draft_kv_heads = None
        self._head_sharded_draft_regions = set[int]()
        self._transfer_layer_region_indices = ()
        self._transfer_layer_group_ids = ()
        self.kv_caches_base_addr = defaultdict[str, dict[int, list[int]]](dict)

    def __del__(self) -> None:
        pass

    def shutdown(self) -> None:
        pass


def cache_of(
    backend: Any, spec: Any, layout: str, dtype: torch.dtype
) -> tuple[dict[str, torch.Tensor], StandInWorker]:
    """vLLM's own plan, allocation and registration: the caches by layer, and the worker."""
    config = stand_in_config(backend, spec, layout, dtype)
    planned = plan_cache(config, [KVCacheGroupSpec(list(LAYERS), spec)])
    caches = allocate_kv_cache(planned, torch.device("cpu"), KVCacheLayout[layout])
    worker = StandInWorker(config, planned, backend, layout)
    # A digest needs a whole configuration, and is no geometry.
    base_worker.compute_nixl_compatibility_hash = lambda *a, **k: "stand-in"
    NixlPullConnectorWorker.register_kv_caches(worker, caches)
    return caches, worker


def page_of(description: EngineDescription, layer: str, block: int) -> bytes:
    """A page read through the regions, byte spans in the order of the planes."""
    pieces = []
    for region in description.regions:
        if layer in region.layers:
            address = region.block_address(block)
            for span in region.planes:
                pieces.append(
                    (span.plane, span.start_bytes, ctypes.string_at(address, span.num_bytes))
                )
                address += span.num_bytes
    return b"".join(piece for _, _, piece in sorted(pieces))


def run(case: Case) -> dict[str, Any]:
    """Register the case's cache and compare; the findings, as plain values."""
    backend = BACKENDS[case.backend]
    dtype = getattr(torch, case.dtype)
    spec = FullAttentionSpec(
        block_size=case.tokens, num_kv_heads=case.heads, head_size=case.head_dim, dtype=dtype
    )
    caches, worker = cache_of(backend, backend.customize_spec(spec), case.layout, dtype)
    description = describe(worker, caches)
    generator = torch.Generator().manual_seed(1)
    storage = next(iter(caches.values())).untyped_storage()
    raw = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))
    raw.copy_(torch.randint(0, 256, raw.shape, generator=generator, dtype=torch.uint8))
    format = description.format
    wrong_pages = 0
    for name, cache in caches.items():
        # What is opaque has no pages of its own to look at.
        for block in range(NUM_BLOCKS if format is not None and format.family != "opaque" else 0):
            # Logical [H, N, C] (or slots); a token-major page is [N, H, C].
            page = cache[block]
            if case.layout in ("LBNHC", "BLNHC"):
                page = page.transpose(0, 1)
            expected = page.contiguous().view(torch.uint8).numpy().tobytes()
            wrong_pages += page_of(description, name, block) != expected
    plan = TransferPlan(description.regions, description.regions)
    pages = runs(LOCAL_IDS, REMOTE_IDS)
    local_ids, remote_ids = plan.descriptor_ids(pages)
    stock = worker._compute_desc_ids([LOCAL_IDS], NUM_BLOCKS, None, 1)
    stock_remote = worker._compute_desc_ids([REMOTE_IDS], NUM_BLOCKS, None, 1)
    return asdict(case) | {
        "vllm": vllm_version,
        "format": None if format is None else format.family,
        "regions_a_layer": len(description.regions) / len(LAYERS),
        "wrong_pages": wrong_pages,
        "our_rows": plan.local_rows.tolist(),
        "stock_rows": np.array(worker.src_blocks_data).tolist(),
        "our_pairs": sorted(zip(local_ids.tolist(), remote_ids.tolist(), strict=True)),
        "stock_pairs": sorted(zip(stock.tolist(), stock_remote.tolist(), strict=True)),
    }


def main() -> int:
    """Print the findings of every case."""
    for case in cases():
        sys.stdout.write(json.dumps(run(case)) + "\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
