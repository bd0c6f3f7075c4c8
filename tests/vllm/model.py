"""A Qwen3 model, tiny by default, with seeded weights, written as a safetensors file.

With windows it is a Llama, whose layers may attend to the last tokens only: vLLM then keeps several
KV groups.

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
    """The rest of the model.

    Attributes:
        window: how many tokens the layers in `windowed` attend to; 0: all layers attend to all.
        has_qk_norm: otherwise it is a Llama model with the same weights.
    """

    layers: int = LAYERS
    hidden: int = 256
    max_tokens: int = 4096
    window: int = 0
    windowed: tuple[int, ...] = ()
    has_qk_norm: bool = True

    @property
    def name(self) -> str:
        kind = "" if self.has_qk_norm else "-llama"
        name = f"l{self.layers}-w{self.hidden}-t{self.max_tokens}{kind}"
        return f"{name}-s{self.window}-{'.'.join(map(str, self.windowed))}" if self.window else name


def build_model(
    directory: Path,
    shape: ModelShape,
    size: ModelSize = ModelSize(),
    *,
    seed: int = 0,
    num_files: int = 1,
) -> Path:
    """Write the model under `directory`; the same shape, size and seed give the same tensors."""
    path = directory / f"{shape.name}-{size.name}"
    if (path / "config.json").exists():
        return path
    path.mkdir(parents=True, exist_ok=True)
    hidden, query_heads = size.hidden, 2 * shape.kv_heads
    weights = _weights(shape, size, query_heads, seed)
    if size.window:
        for layer in range(size.layers):
            for part in ("q", "k"):
                prefix = f"model.layers.{layer}.self_attn.{part}"
                # In its place: else every token attends to all others alike.
                del weights[f"{prefix}_norm.weight"]
                weights[f"{prefix}_proj.weight"] *= 2
    _write_weights(path, weights, num_files)
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
    if size.window:
        kinds = ("full_attention", "sliding_attention")
        config |= {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "sliding_window": size.window,
            "layer_types": [kinds[n in size.windowed] for n in range(size.layers)],
        }
    (path / "config.json").write_text(json.dumps(config, indent=1))
    return path


def _weights(
    shape: ModelShape, size: ModelSize, query_heads: int, seed: int
) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(
        1 + seed + sum(ord(char) for char in json.dumps(asdict(shape)))
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


def _write_weights(path: Path, tensors: dict[str, torch.Tensor], num_files: int) -> None:
    """In one file, or in several with an index, the tensors dealt out in turn."""
    if num_files == 1:
        _write_safetensors(path / "model.safetensors", tensors)
        return
    weight_map: dict[str, str] = {}
    for index in range(num_files):
        file = f"model-{index + 1:05}-of-{num_files:05}.safetensors"
        names = list(tensors)[index::num_files]
        _write_safetensors(path / file, {name: tensors[name] for name in names})
        weight_map |= dict.fromkeys(names, file)
    text = json.dumps({"metadata": {}, "weight_map": weight_map})
    (path / "model.safetensors.index.json").write_text(text)


def _write_safetensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    names = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
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
