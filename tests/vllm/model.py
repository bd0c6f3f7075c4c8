"""A Qwen3 model, tiny by default, with seeded weights, written as a safetensors file.

The weights are large enough that attention decides every logit: a cache whose bytes are
permuted changes the greedy token at once. Nothing is downloaded and no tokenizer is needed.
"""

from __future__ import annotations

import json
import struct
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

VOCABULARY = 512
LAYERS = 3


@dataclass(frozen=True)
class ModelShape:
    """What a page depends on."""

    kv_heads: int = 2
    head_dim: int = 64
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        return f"qwen3-h{self.kv_heads}-d{self.head_dim}-{self.dtype}"


@dataclass(frozen=True)
class ModelSize:
    """The rest of the model."""

    layers: int = LAYERS
    hidden: int = 256
    max_tokens: int = 4096
    has_qk_norm: bool = True
    """Otherwise it is a Llama model with the same weights."""

    @property
    def name(self) -> str:
        kind = "" if self.has_qk_norm else "-llama"
        return f"l{self.layers}-w{self.hidden}-t{self.max_tokens}{kind}"


def build_model(directory: Path, shape: ModelShape, size: ModelSize = ModelSize()) -> Path:
    """Write the model under `directory`; the same shape and size give the same bytes."""
    path = directory / f"{shape.name}-{size.name}"
    if (path / "config.json").exists():
        return path
    path.mkdir(parents=True, exist_ok=True)
    hidden, query_heads = size.hidden, 2 * shape.kv_heads
    _write_safetensors(path / "model.safetensors", _weights(shape, size, query_heads))
    config = {
        "architectures": ["Qwen3ForCausalLM" if size.has_qk_norm else "LlamaForCausalLM"],
        "model_type": "qwen3" if size.has_qk_norm else "llama",
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": size.layers,
        "num_attention_heads": query_heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": size.max_tokens,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": shape.dtype,
        "bos_token_id": None,
        "eos_token_id": VOCABULARY - 1,
    }
    (path / "config.json").write_text(json.dumps(config, indent=1))
    return path


def _weights(shape: ModelShape, size: ModelSize, query_heads: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(
        1 + sum(ord(char) for char in json.dumps(asdict(shape)))
    )
    dtype = getattr(torch, shape.dtype)

    def normal(*size: int, scale: float) -> torch.Tensor:
        return (torch.randn(size, generator=generator) * scale).to(dtype)

    def ones(size: int, value: float = 1.0) -> torch.Tensor:
        return torch.full((size,), value, dtype=dtype)

    q_size, kv_size = query_heads * shape.head_dim, shape.kv_heads * shape.head_dim
    hidden = size.hidden
    unit = hidden**-0.5
    weights = {
        "model.embed_tokens.weight": normal(VOCABULARY, hidden, scale=0.3),
        "model.norm.weight": ones(hidden),
        "lm_head.weight": normal(VOCABULARY, hidden, scale=1.0),
    }
    for layer in range(size.layers):
        prefix = f"model.layers.{layer}."
        weights |= {
            prefix + "input_layernorm.weight": ones(hidden),
            prefix + "post_attention_layernorm.weight": ones(hidden),
            prefix + "self_attn.q_proj.weight": normal(q_size, hidden, scale=unit),
            prefix + "self_attn.k_proj.weight": normal(kv_size, hidden, scale=unit),
            prefix + "self_attn.v_proj.weight": normal(kv_size, hidden, scale=unit),
            # A large output projection: the residual stream is mostly attention.
            prefix + "self_attn.o_proj.weight": normal(hidden, q_size, scale=3.0 * q_size**-0.5),
            prefix + "mlp.gate_proj.weight": normal(2 * hidden, hidden, scale=unit),
            prefix + "mlp.up_proj.weight": normal(2 * hidden, hidden, scale=unit),
            prefix + "mlp.down_proj.weight": normal(hidden, 2 * hidden, scale=0.3 * unit),
        }
        if size.has_qk_norm:
            for name in ("q_norm", "k_norm"):
                weights[f"{prefix}self_attn.{name}.weight"] = ones(shape.head_dim, 1.5)
    return weights


def _write_safetensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    names = {torch.bfloat16: "BF16", torch.float16: "F16"}
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": names[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(head)) + head)
        for tensor in tensors.values():
            file.write(tensor.contiguous().view(torch.uint8).numpy().tobytes())
