"""How engines are run: on GPUs, or with a tiny model on a CPU to try the script."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.gpu.arms import Arm, Side
from tests.vllm.client import EngineOptions
from tests.vllm.model import ModelShape, ModelSize
from tests.vllm.oracle import PageShape
from tests.vllm.pair import kvpd_transfer, stock_transfer

BLOCK_TOKENS = 16
GRAPHS = {
    "mode": 0,
    "cudagraph_mode": "FULL_DECODE_ONLY",
    "cudagraph_capture_sizes": [1, 2, 4, 8],
}
GPU_ENVIRONMENT = {
    "NCCL_SOCKET_IFNAME": "lo",
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    # Which protocol UCX chose is part of the result.
    "UCX_PROTO_INFO": "y",
}
# Without it UCX reads a peer on the same GPU through a TCP socket.
SAME_GPU_ENVIRONMENT = {"UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on"}


@dataclass(frozen=True)
class Scale:
    """How much is run.

    Attributes:
        blocks: whole blocks of each prompt that is compared; each has one token more.
        shared_blocks: leading blocks of the longest that a further prompt shares.
        measured_blocks: whole blocks of each measured prompt.
        num_churned: hand-overs before the first that is measured.
        num_passes: how often everything below is measured.
        num_measured: hand-overs that are timed one by one.
        num_arrivals: requests that arrive while another one decodes, in each of `num_rounds`.
        spacing_tokens: tokens of that one between two arrivals.
        num_burst: requests that arrive at once.
    """

    model: ModelSize
    shape: ModelShape
    blocks: tuple[int, ...]
    shared_blocks: int
    measured_blocks: int
    num_churned: int
    num_passes: int
    num_measured: int
    num_arrivals: int
    num_rounds: int
    spacing_tokens: int
    num_burst: int
    num_blocks: int
    max_model_len: int

    @property
    def page(self) -> PageShape:
        return PageShape(self.shape.kv_heads, BLOCK_TOKENS, self.shape.head_dim, self.shape.dtype)

    @property
    def cache_bytes(self) -> int:
        """The cache of one engine."""
        page_bytes = 2 * self.shape.kv_heads * BLOCK_TOKENS * self.shape.head_dim * 2
        return self.num_blocks * page_bytes * self.model.layers


FULL = Scale(
    model=ModelSize(layers=36, hidden=1024, max_tokens=8192),
    shape=ModelShape(kv_heads=8, head_dim=128),
    blocks=(1, 2, 16, 64, 128, 256),
    shared_blocks=128,
    measured_blocks=256,
    num_churned=12,
    num_passes=2,
    num_measured=10,
    num_arrivals=6,
    num_rounds=2,
    spacing_tokens=40,
    num_burst=6,
    num_blocks=2048,
    max_model_len=4608,
)
# What has to be right, in minutes: fewer layers, and hardly anything is timed.
SMOKE = replace(
    FULL,
    model=ModelSize(layers=12, hidden=1024, max_tokens=8192),
    num_churned=1,
    num_measured=3,
    num_burst=4,
    num_blocks=1024,
)
TINY = Scale(
    model=ModelSize(),
    shape=ModelShape(),
    blocks=(1, 2, 6),
    shared_blocks=3,
    measured_blocks=5,
    num_churned=1,
    num_passes=2,
    num_measured=2,
    num_arrivals=2,
    num_rounds=1,
    spacing_tokens=4,
    num_burst=3,
    num_blocks=128,
    max_model_len=512,
)


@dataclass(frozen=True)
class Bed:
    """Where engines run.

    Attributes:
        num_gpus: 2 (a side each), 1 (both sides on it), or 0: on the CPU.
    """

    num_gpus: int
    scale: Scale
    model: Path

    def alone(self, backend: str) -> EngineOptions:
        """An engine that prefills and decodes by itself."""
        return self._options(backend, None, self.num_gpus - 1, {})

    def sides(self, arm: Arm) -> tuple[EngineOptions, EngineOptions]:
        """Both engines of a pair."""
        return (
            self.prefill(arm.prefill),
            self.decode(arm.decode, convert_on_main_stream=arm.on_main_stream),
        )

    def prefill(self, side: Side) -> EngineOptions:
        """A prefill, on the first GPU."""
        return self._options(side.backend, _transfer(side, "kv_producer", self), 0, {})

    def decode(self, side: Side, **switches: Any) -> EngineOptions:
        """A decoder, on the last GPU."""
        transfer = _transfer(side, "kv_consumer", self)
        return self._options(side.backend, transfer, self.num_gpus - 1, switches)

    @property
    def buffer_device(self) -> str:
        """vLLM's ``kv_buffer_device``."""
        return "cuda" if self.num_gpus else "cpu"

    def implementation(self, backend: str) -> str:
        """The attention class that has to be in use."""
        names = {
            True: {
                "standard": "TritonAttentionImpl",
                "flash": "FlashAttentionImpl",
                "shuffled": "ShuffledTritonImpl",
            },
            False: {
                "standard": "StandardAttention",
                "flash": "StandardAttention",
                "shuffled": "ShuffledAttention",
            },
        }
        return names[self.num_gpus > 0][backend]

    def _options(
        self,
        backend: str,
        transfer: dict[str, Any] | None,
        gpu: int,
        switches: dict[str, Any],
    ) -> EngineOptions:
        scale = self.scale
        arguments: dict[str, Any] = {}
        environment: dict[str, str] = {}
        if self.num_gpus:
            arguments = {
                "enforce_eager": False,
                "compilation_config": GRAPHS,
                # Engines start at once on one GPU: each takes what it needs, none measures.
                "gpu_memory_utilization": 0.05,
                "kv_cache_memory_bytes": scale.cache_bytes,
            }
            environment = GPU_ENVIRONMENT | {"CUDA_VISIBLE_DEVICES": str(gpu)}
            if self.num_gpus == 1:
                environment |= SAME_GPU_ENVIRONMENT
        return EngineOptions(
            self.model,
            backend,
            dtype=scale.shape.dtype,
            block_size=BLOCK_TOKENS,
            num_blocks=scale.num_blocks,
            max_model_len=scale.max_model_len,
            # A prompt is one batch on every engine: the same kernels see the same shapes.
            max_num_batched_tokens=8192,
            enable_prefix_caching=True,
            transfer=transfer,
            llm_args=arguments,
            environment=environment,
            module="tests.gpu.engine",
            switches=switches | {"device": "cuda" if self.num_gpus else "cpu"},
        )


def _transfer(side: Side, role: str, bed: Bed) -> dict[str, Any]:
    make = kvpd_transfer if side.connector == "kvpd" else stock_transfer
    return make(role, kv_buffer_device=bed.buffer_device, **side.extra)
