"""What this engine loaded, as the facts of its handshake: model, element type, scales, draft model.

Nothing here keeps an engine from starting. What cannot be told is None, unknown to peers, and a log
line says why: a peer then compares names, and warns.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, TypeVar

from vllm import envs
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
    _get_speculative_compatibility_factors,
)
from vllm.platforms import current_platform
from vllm.utils.torch_utils import resolve_kv_cache_dtype_string

from kvpd.vllm.fingerprint.checkpoint import Source, unknown, weight_files
from kvpd.vllm.fingerprint.configuration import listed_fields
from kvpd.vllm.fingerprint.weights import weights_digest

# vLLM configures handlers for its own loggers only.
logger = logging.getLogger("vllm.kvpd")
_TORCH_NAME = "torch."
# Spellings of one element type; a setting that is not here is an element type of its own.
_SPELLINGS = {"half": "float16", "float": "float32", "fp8_e5m2": "float8_e5m2"}
_PLATFORMS_OWN = frozenset({"fp8", "fp8_e4m3"})
_Value = TypeVar("_Value")

LayerScales = tuple[str, list[float], list[float]]


def model_facts(config: Any) -> dict[str, Any]:
    """`EngineFacts`' account of the model: name, configuration, weights, quantisation."""
    model = config.model_config
    return {
        "model": model.model,
        "model_dtype": str(model.dtype).removeprefix(_TORCH_NAME),
        "model_config": _or_unknown("configuration", lambda: _fields(model)),
        "model_weights": _or_unknown("weights", lambda: _weights(model, config.load_config)),
        "quantization": _quantization(model),
        "speculative": speculative(config),
    }


def cache_element(config: Any) -> str:
    """The element type of the cache, whatever setting it was resolved from."""
    model = config.model_config
    setting = str(config.cache_config.cache_dtype)
    resolved = str(resolve_kv_cache_dtype_string(setting, model))
    if resolved == "auto":
        return str(model.dtype).removeprefix(_TORCH_NAME)
    if resolved in _PLATFORMS_OWN:
        # Which of two 8-bit floats "fp8" is, the hardware decides.
        return str(current_platform.fp8_dtype()).removeprefix(_TORCH_NAME)
    return _SPELLINGS.get(resolved, resolved)


def scale_facts(specs: Mapping[str, Any], layers: Mapping[str, Any]) -> dict[str, Any]:
    """`EngineFacts`' account of a quantised cache.

    In vLLM 0.30 to 0.33 scales are fixed when weights have been loaded, before caches are
    registered; none of them computes scales at run time. Where each token has its own scale it lies
    in the page, and the layer's is 1.

    Args:
        specs: of each layer that keeps a cache, vLLM's spec of it.
        layers: the layers themselves.
    """
    quantised = [name for name, spec in specs.items() if getattr(spec, "kv_quant_mode", 0)]
    if not quantised:
        return {"quantised_cache": False}
    scales = _or_unknown(
        "scales of the KV cache",
        lambda: [
            (name, _scales(name, layers[name], "k"), _scales(name, layers[name], "v"))
            for name in quantised
            # Caches of an index have their scales in the page, and the layer has none.
            if hasattr(layers[name], "_k_scale_float")
        ],
    )
    return {"quantised_cache": True, "scales": scales}


def speculative(config: Any) -> str:
    """Stock's factors of a draft model, short enough to be published whatever it is called."""
    factors = _get_speculative_compatibility_factors(config)
    if factors is None:
        return "none"
    settings = config.speculative_config
    draft = settings.draft_model_config
    load_config = getattr(settings, "draft_load_config", None) or config.load_config
    name = str(factors["model"])[-64:]
    weights = _or_unknown("weights of the draft model", lambda: _weights(draft, load_config))
    fields = _or_unknown("configuration of the draft model", lambda: _fields(draft))
    if weights is not None and fields is not None:
        # As of the model itself, what was loaded in place of what it is called.
        name = f"draft weights {weights[:16]}"
        factors = {**factors, "model": weights, "revision": fields, "code_revision": None}
    digest = hashlib.sha256(repr(sorted(factors.items())).encode()).hexdigest()
    return f"{factors['method']} {name} {digest[:16]}"


def _fields(model: Any) -> dict[str, str]:
    return listed_fields(
        model.hf_text_config.to_dict(),
        architectures=getattr(model.hf_config, "architectures", None),
        max_model_len=model.max_model_len,
    )


def _weights(model: Any, load_config: Any) -> str:
    return _sampled(
        Source(
            # Not the model's name where its weights lie elsewhere, as in an object store.
            model=str(getattr(model, "model_weights", "") or model.model),
            revision=model.revision,
            download_dir=load_config.download_dir,
            load_format=str(load_config.load_format),
            is_from_other_hub=bool(envs.VLLM_USE_MODELSCOPE),
        )
    )


@lru_cache(maxsize=8)
def _sampled(source: Source) -> str:
    # Once a process: what was loaded stays what it is when the files are replaced.
    return weights_digest(weight_files(source))


def _quantization(model: Any) -> str:
    """The checkpoint's own method, or the one that its weights are quantised by when loaded.

    vLLM's name of the method is no fact: of one checkpoint it depends on the GPU's kernels.
    """
    config = getattr(model, "hf_config", None)
    for name in ("quantization_config", "compression_config"):
        own = getattr(config, name, None)
        # A map as it was written, or transformers' object of it.
        method = own.get("quant_method") if isinstance(own, dict) else None
        method = method or getattr(own, "quant_method", None)
        if method:
            return str(getattr(method, "value", method))
    return str(getattr(model, "quantization", None) or "none")


def _scales(name: str, layer: Any, component: str) -> list[float]:
    """One scale, or one a head: what kernels multiply by, on the device and as a number."""
    number = float(getattr(layer, f"_{component}_scale_float"))
    values = [float(value) for value in getattr(layer, f"_{component}_scale").flatten().tolist()]
    if len(values) == 1 and values[0] != number:
        raise unknown(f"{name}: {component} is scaled by {values[0]} and by {number}")
    if not all(math.isfinite(value) and value > 0 for value in values):
        raise unknown(f"{name}: {component} is scaled by {values[:8]}")
    return values


def _or_unknown(what: str, read: Callable[[], _Value]) -> _Value | None:
    try:
        return read()
    # The boundary: files, configurations and layers are other people's, and an engine that would
    # serve must start. Nothing is guessed: what failed is unknown.
    except Exception as error:
        logger.warning("the %s cannot be told to peers: %s: %s", what, type(error).__name__, error)
        return None
