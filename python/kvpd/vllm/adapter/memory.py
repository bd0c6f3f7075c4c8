"""The slab's default size on this engine's GPU."""

from __future__ import annotations

import logging
from typing import Any

import torch

from kvpd._kvpd import EngineDescription
from kvpd.vllm.config import ConnectorConfig
from kvpd.vllm.slab_size import DeviceMemory, default_size, takes_default

# vLLM configures handlers for its own loggers only.
logger = logging.getLogger("vllm.kvpd")


def default_slab_bytes(
    vllm_config: Any, config: ConnectorConfig, description: EngineDescription, device: torch.device
) -> int:
    """What to allocate where the operator gave no size; 0 for none.

    To be asked when caches are registered: vLLM 0.30 to 0.33 do that after they have sized and
    allocated them, and before they capture graphs.
    """
    page_format, cache = description.format, vllm_config.cache_config
    if page_format is None or not takes_default(
        config,
        is_reader=vllm_config.kv_transfer_config.is_kv_consumer,
        is_on_gpu=device.type == "cuda",
        can_sleep=vllm_config.model_config.enable_sleep_mode,
    ):
        return 0
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    memory = DeviceMemory(
        total_bytes,
        free_bytes,
        torch.cuda.memory_reserved(device),
        None if cache.kv_cache_memory_bytes else cache.gpu_memory_utilization,
    )
    size = default_size(memory, page_format.page_bytes)
    if size.note:
        logger.warning("%s", size.note)
    return size.num_bytes
