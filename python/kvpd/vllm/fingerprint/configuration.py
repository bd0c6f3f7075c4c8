"""The fields of a model's configuration that decide what K and V are, in one list.

K and V of a layer depend on everything that the layers below computed, so the list is of what the
model computes, not of attention alone. What is left out: names and paths, token ids, dropout and
initialisation, which move no value; element types and quantisation, which are facts of their own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

# (why, fields). Families of models name one thing differently; all of its names are listed.
LISTED: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "which computation it is, and its extents",
        (
            "model_type", "hidden_size", "n_embd", "d_model", "embedding_size", "intermediate_size",
            "ffn_hidden_size", "n_inner", "num_hidden_layers", "n_layer", "num_layers",
            "num_attention_heads", "n_head", "num_key_value_heads", "num_kv_heads", "n_head_kv",
            "multi_query", "multi_query_group_num", "head_dim", "kv_channels", "v_head_dim",
            "global_head_dim", "swa_head_dim", "vocab_size", "hidden_size_per_layer_input",
            "attention_k_eq_v",
        ),
    ),
    (
        "latent attention and its index",
        (
            "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "qk_head_dim",
            "index_head_dim", "index_n_heads", "index_topk",
        ),
    ),
    (
        "positions; rope itself is read apart, its fields moved between releases",
        ("position_embedding_type", "alibi", "no_rope_layers", "no_rope_layer_interval",
         "nope_layer_interval", "mrope_section"),
    ),
    (
        "which tokens a layer sees, hence what it hands to the next",
        (
            "sliding_window", "use_sliding_window", "sliding_window_size", "max_window_layers",
            "sliding_window_pattern", "layer_types", "attention_chunk_size", "window_size",
            "num_kv_shared_layers", "full_attention_interval", "attn_layer_indices",
            "layers_block_type", "hybrid_override_pattern", "cross_attention_layers",
        ),
    ),
    (
        "norms, activations, and terms that a layer has or has not",
        (
            "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "layernorm_epsilon", "norm_eps",
            "norm_epsilon", "hidden_act", "hidden_activation", "activation_function",
            "qk_norm", "use_qk_norm", "qk_layernorm", "attention_bias", "qkv_bias", "bias",
            "use_bias", "mlp_bias", "parallel_attn", "use_parallel_residual",
            "new_decoder_architecture", "clip_qkv", "swiglu_limit",
        ),
    ),
    (
        "factors",
        (
            "query_pre_attn_scalar", "attn_logit_softcapping", "attention_multiplier",
            "embedding_multiplier", "residual_multiplier", "scale_emb", "scale_depth",
            "attn_temperature_tuning", "attn_scale", "floor_scale", "query_scale",
        ),
    ),
    (
        "experts, and how they are chosen",
        (
            "num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts",
            "num_shared_experts", "num_experts_per_tok", "moe_intermediate_size", "moe_k",
            "shared_expert_intermediate_size", "norm_topk_prob", "routed_scaling_factor",
            "scoring_func", "topk_method", "n_group", "topk_group", "first_k_dense_replace",
            "moe_layer_freq", "decoder_sparse_step", "mlp_only_layers",
        ),
    ),
    (
        "layers with a state in place of K and V",
        (
            "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim",
            "linear_value_head_dim", "linear_conv_kernel_dim", "mamba_d_state", "mamba_d_conv",
            "mamba_expand", "mamba_n_heads", "mamba_num_heads", "mamba_d_head", "mamba_head_dim",
            "mamba_n_groups", "ssm_state_size", "state_size", "conv_kernel", "time_step_limit",
        ),
    ),
)  # fmt: skip
# Of rope, where transformers had them before its release 5 and has them since.
_ROPE_FIELDS = (
    "rope_theta", "rope_local_base_freq", "global_rope_theta", "local_rope_theta",
    "partial_rotary_factor", "rotary_pct", "rotary_dim", "rope_interleave", "rope_ratio",
)  # fmt: skip
_ROPE_MAPS = ("rope_scaling", "rope_parameters")
_LONG = frozenset({"longrope", "su"})
# Longer values travel as their digest.
_MAX_VALUE_BYTES = 1024


def listed_fields(
    config: Mapping[str, Any], *, architectures: Any = None, max_model_len: int | None = None
) -> dict[str, str]:
    """The listed fields that are set, each as canonical JSON.

    A field that is absent, None, False or empty is left out: which of these stands for "not so"
    differs between releases of transformers.

    Args:
        config: a model's text configuration as a map, after overrides.
        architectures: names of the classes that compute it.
        max_model_len: the longest sequence; some kinds of rope depend on it.

    Raises:
        TypeError, ValueError: a value that JSON cannot tell.
    """
    names = [name for _, names in LISTED for name in names]
    values = {name: config[name] for name in names if name in config}
    values["architectures"] = architectures
    values["rope"] = _rope(config, max_model_len)
    kept = {name: _plain(value) for name, value in values.items()}
    return {name: _text(value) for name, value in sorted(kept.items()) if not _is_unset(value)}


def _rope(config: Mapping[str, Any], max_model_len: int | None) -> dict[str, Any]:
    rope: dict[str, Any] = {name: config.get(name) for name in _ROPE_FIELDS}
    for name in _ROPE_MAPS:
        rope.update(_plain(config.get(name)) or {})
    rope = _named_alike(rope)
    if "rope_type" in rope or any(
        isinstance(value, dict) and "rope_type" in value for value in rope.values()
    ):
        # Scaled positions depend on the length that the model was made for.
        rope["max_position_embeddings"] = config.get("max_position_embeddings")
    original = rope.get(
        "original_max_position_embeddings", config.get("original_max_position_embeddings")
    )
    if rope.get("rope_type") in _LONG and original and max_model_len is not None:
        # vLLM takes the factors of long sequences for all sequences of an engine, or for none.
        rope["original_max_position_embeddings"] = original
        rope["uses_long_factors"] = max_model_len > original
    return {name: value for name, value in rope.items() if not _is_unset(value)}


def _named_alike(rope: Mapping[str, Any]) -> dict[str, Any]:
    alike: dict[str, Any] = {}
    for name, value in rope.items():
        if isinstance(value, dict):
            alike[name] = _named_alike(value)
        elif name in ("type", "rope_type"):
            # Absent is the default.
            if value not in (None, "default"):
                alike["rope_type"] = value
        elif not _is_unset(value):
            alike[name] = value
    return alike


def _is_unset(value: object) -> bool:
    return value is None or value is False or value in ("", [], {})


def _plain(value: Any) -> Any:
    """Numbers that are equal are written alike: 10000.0 and 10000."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _text(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    if len(text) > _MAX_VALUE_BYTES:
        text = f"sha256:{hashlib.sha256(text.encode()).hexdigest()} of {len(text)} characters"
    return text
