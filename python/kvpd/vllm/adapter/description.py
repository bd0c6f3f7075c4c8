"""What vLLM registered on this rank, as an `EngineDescription`."""

from __future__ import annotations

from typing import Any, cast

import torch
from vllm import __version__ as vllm_version
from vllm.config import get_layers_from_vllm_config
from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NIXL_CONNECTOR_VERSION
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.platforms import current_platform

from kvpd._kvpd import EngineDescription, EngineFacts, Region
from kvpd.vllm.adapter.model_facts import cache_element, model_facts, scale_facts
from kvpd.vllm.formats import (
    AITER_FA,
    AITER_UNIFIED,
    LayerCache,
    declared_format,
    opaque,
    page_format,
    spans_of,
)
from kvpd.vllm.versions import public_release

# Specs whose page is K and V of every token, one slot per token; MLA and state caches are not.
_PLAIN_SPECS = frozenset({"FullAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec"})
_UNQUANTISED = frozenset({torch.bfloat16, torch.float16, torch.float32})
_TORCH_NAME = "torch."
_IN_TREE = "vllm."
# Memory order in which a plane of all blocks is one piece.
_BY_PLANES = "LHBNC"
# MiniMax M3's sparse layers keep other pages where AITER's switch is on.
_MINIMAX_M3 = "vllm.models.minimax_m3."


def own_layout(vllm_config: Any) -> str | None:
    """The layout for the model's attention backend, where its pages have several planes.

    LHBNC where the backend has it, which holds a plane of all blocks in one piece; vLLM 0.30 and
    0.31 list it second. None for one-plane pages: stock's own preference is right for those.
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    try:
        backends = get_current_attn_backends(vllm_config)
    except (ImportError, NotImplementedError, ValueError):
        # An engine core whose workers are other processes has no layers. Stock then selects by
        # the model alone, and raises where a layer asks for a backend that is not for every layer.
        return None
    for backend in backends:
        is_shuffled = _is_shuffled(backend)
        cache = LayerCache(
            backend=".".join(backend.full_cls_name()),
            kv_heads=model.get_num_kv_heads(parallel),
            tokens=vllm_config.cache_config.block_size,
            head_dim=model.get_head_size(),
            dtype=str(model.dtype).removeprefix(_TORCH_NAME),
            layout="LBHNC",
            page_bytes=0,
            has_plain_content=True,
            is_shuffled=is_shuffled,
            num_head_slots=2 if is_shuffled else None,
        )
        declared = declared_format(cache, backend)
        if declared is None or len(declared.plane_bytes) == 1:
            continue
        layouts = backend.supported_kv_cache_layouts()
        # None is any layout.
        names = [_BY_PLANES] if layouts is None else [str(layout.name) for layout in layouts]
        if names:
            return _BY_PLANES if _BY_PLANES in names else names[0]
    return None


def describe(worker: Any, kv_caches: dict[str, torch.Tensor]) -> EngineDescription:
    """What this rank registered: stock's regions, each with its layers, format and bytes of a page.

    Raises:
        FormatError, RegionError: a declared format contradicts what was registered.
    """
    config, model = worker.vllm_config, worker.model_config
    addresses = worker.kv_caches_base_addr[worker.engine_id][worker.tp_rank]
    of_layer: dict[str, list[int]] = {}
    for index, name in enumerate(worker.region_names):
        of_layer.setdefault(name, []).append(index)
    # Layers that share a region with another one have none under their own name.
    sharing = {
        name: addresses.index(kv_caches[name].data_ptr())
        for name in worker._layer_specs
        if name in kv_caches and name not in of_layer and kv_caches[name].data_ptr() in addresses
    }
    layers = get_layers_from_vllm_config(config, cast(Any, AttentionLayerBase), None)
    regions: dict[int, Region] = {}
    for name, indices in of_layer.items():
        members = [name, *(other for other, index in sharing.items() if index in indices)]
        backend = layers[name].get_attn_backend()
        page_bytes = sum(worker.block_len_per_layer[index] for index in indices)
        cache = _layer_cache(worker, members, backend, page_bytes)
        places = [addresses[index] for index in indices]
        if len(members) == 1 and _are_slots(kv_caches[name], places, page_bytes):
            format = page_format(cache, backend)
        else:
            format = opaque(cache)
        for position, index in enumerate(indices):
            is_host = worker.region_mem_types[index] == "DRAM"
            regions[index] = Region(
                addresses[index],
                worker.region_num_blocks[index],
                worker.block_len_per_layer[index],
                worker.block_stride_per_layer[index],
                format=format,
                planes=spans_of(format, len(indices), position),
                layers=members,
                memory="dram" if is_host else "vram",
                device=0 if is_host else worker.device_id,
            )
    facts = EngineFacts(
        **model_facts(config),
        **scale_facts(worker._layer_specs, layers),
        cache_dtype=cache_element(config),
        cache_dtype_setting=str(config.cache_config.cache_dtype),
        total_kv_heads=model.get_total_num_kv_heads(),
        head_dim=model.get_head_size(),
        block_size=worker.block_size,
        layout=worker.kv_cache_layout,
        backend=worker.backend_name,
        release=vllm_version,
        connector=f"nixl {NIXL_CONNECTOR_VERSION} {worker._TRANSFER_MODE}",
        hybrid_manager=not config.scheduler_config.disable_hybrid_kv_cache_manager,
        tp_size=worker.world_size,
        tp_rank=worker.tp_rank,
        pp_size=worker.pp_size,
        num_kv_groups=len(worker.kv_cache_config.transfer_groups),
        uses_mla=worker.use_mla,
    )
    return EngineDescription(facts, [regions[index] for index in sorted(regions)])


def stock_knows_pages(worker: Any) -> bool:
    """Whether the backends' names, which stock's digest holds, say how all pages look.

    They do not for the shuffle switch, nor for backends that are not vLLM's own.
    """
    return all(
        ".".join(backend.full_cls_name()).startswith(_IN_TREE) and not _is_shuffled(backend)
        for backend in worker.attn_backends
    )


def _layer_cache(worker: Any, members: list[str], backend: Any, page_bytes: int) -> LayerCache:
    spec = worker._layer_specs[members[0]]
    is_plain = (
        type(spec).__name__ in _PLAIN_SPECS
        and spec.kv_quant_mode == 0
        and spec.tokens_per_state == 1
        and spec.page_size_padded is None
        and spec.head_size == spec.head_size_v
        # A backend may publish other content under a plain spec.
        and spec.unpadded_page_size_bytes == _plain_bytes(spec)
    )
    return LayerCache(
        backend=".".join(backend.full_cls_name()),
        kv_heads=getattr(spec, "num_kv_heads", 1),
        tokens=worker.block_size,
        head_dim=getattr(spec, "head_size", 1),
        dtype=str(getattr(spec, "dtype", "uint8")).removeprefix(_TORCH_NAME),
        layout=worker.kv_cache_layout,
        page_bytes=page_bytes,
        has_plain_content=is_plain,
        num_head_slots=getattr(spec, "num_head_slots", None),
        is_shuffled=_is_shuffled(backend),
        identity=repr(
            (
                public_release(vllm_version),
                [worker._layer_specs[m] for m in members],
                _hardware_factors(worker, spec),
            )
        ),
    )


def _plain_bytes(spec: Any) -> int:
    elements = 2 * spec.num_kv_heads * spec.block_size * spec.head_size
    return int(elements * spec.dtype.itemsize)


def _hardware_factors(worker: Any, spec: Any) -> tuple[str, ...]:
    """What the hardware decides about a page's bytes, so that equal specs are not equal pages.

    In vLLM 0.30 to 0.33: the CPU backend's tiles; which of the two 8-bit floats, and how scales of
    an indexer's cache are encoded, where values are quantised.
    """
    if current_platform.is_cpu():
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        config = worker.vllm_config
        head_size = getattr(spec, "head_size", None)
        dtype, cache_dtype = config.model_config.dtype, config.cache_config.cache_dtype
        try:
            tiles = _get_attn_isa(dtype, worker.block_size, head_size, cache_dtype)
        except NotImplementedError:
            # Not the CPU backend's cache: DeepSeek V4 has its own, and no tiles.
            tiles = ""
        return ("cpu", tiles)
    if getattr(spec, "dtype", None) in _UNQUANTISED:
        return ()
    capability = current_platform.get_device_capability()
    return (current_platform.device_name, str(current_platform.fp8_dtype()), str(capability))


def _is_shuffled(backend: Any) -> bool:
    """Whether AITER's switch for shuffled pages is on, and this backend heeds it.

    In vLLM 0.30 to 0.33: AITER FA and MiniMax M3's sparse backends; the unified backend of 0.33 on
    gfx1250 alone, although it publishes no slots then.
    """
    path = ".".join(backend.full_cls_name())
    if path not in (AITER_FA, AITER_UNIFIED) and not path.startswith(_MINIMAX_M3):
        return False
    from vllm._aiter_ops import rocm_aiter_ops

    if not rocm_aiter_ops.is_shuffle_kv_cache_enabled():
        return False
    if path == AITER_UNIFIED:
        from vllm.platforms.rocm import on_gfx1250

        return bool(on_gfx1250())
    return True


def _are_slots(cache: torch.Tensor, places: list[int], page_bytes: int) -> bool:
    """Whether the regions are the page's head slots, in order and each of them dense.

    A page that is not has another map than its format says, whatever its length.
    """
    if cache.dim() != 4 or cache.shape[1] % len(places):
        return False
    size = cache.element_size()
    slots_each = cache.shape[1] // len(places)
    first, stride = cache.data_ptr(), cache.stride(1) * size
    expected = [first + position * slots_each * stride for position in range(len(places))]
    part = cache[:1, :slots_each]
    extent = 1 + sum((n - 1) * s for n, s in zip(part.shape, part.stride(), strict=True))
    return places == expected and extent * size * len(places) == page_bytes
