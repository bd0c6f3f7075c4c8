"""What a fingerprint sees and what it does not: checkpoints written byte by byte; needs no vLLM."""

from __future__ import annotations

import json
import os
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from kvpd.errors import KvpdError
from kvpd.vllm.fingerprint import weights
from kvpd.vllm.fingerprint.checkpoint import Source, weight_files
from kvpd.vllm.fingerprint.configuration import listed_fields
from kvpd.vllm.fingerprint.weights import weights_digest

Tensors = Mapping[str, tuple[str, list[int], bytes]]


def safetensors(path: Path, tensors: Tensors, *, gap: int = 0, pad: int = 0) -> Path:
    """A file as the format's description has it; `gap` spare bytes lie before each tensor."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, (dtype, shape, content) in tensors.items():
        data += bytes(gap)
        offsets = [len(data), len(data) + len(content)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        data += content
    head = json.dumps(header).encode() + b" " * pad
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(head)) + head + data)
    return path


def content(name: str, num_bytes: int) -> bytes:
    return bytes((sum(name.encode()) + 7 * at) % 251 for at in range(num_bytes))


def checkpoint(layers: int = 3, num_bytes: int = 64) -> dict[str, tuple[str, list[int], bytes]]:
    names = ["model.embed_tokens.weight"]
    for layer in range(layers):
        names += [f"model.layers.{layer}.self_attn.{part}_proj.weight" for part in "kv"]
    return {name: ("BF16", [num_bytes // 2], content(name, num_bytes)) for name in names}


def digest(folder: Path, **source: Any) -> str:
    return weights_digest(weight_files(Source(str(folder), **source)))


def why(folder: Path, **source: Any) -> str:
    with pytest.raises(KvpdError) as caught:
        digest(folder, **source)
    assert (caught.value.code, caught.value.field) == ("weights-unknown", "model_weights")
    return str(caught.value)


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    safetensors(tmp_path / "whole/model.safetensors", checkpoint())
    return tmp_path / "whole"


def sharded(folder: Path, tensors: Tensors, num_files: int, *, with_index: bool = True) -> Path:
    weight_map: dict[str, str] = {}
    for index in range(num_files):
        names = sorted(tensors)[index::num_files]
        file = f"model-{index + 1:05}-of-{num_files:05}.safetensors"
        safetensors(folder / file, {name: tensors[name] for name in names}, gap=index)
        weight_map |= dict.fromkeys(names, file)
    if with_index:
        text = json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map})
        (folder / "model.safetensors.index.json").write_text(text)
    return folder


@pytest.mark.parametrize("with_index", [True, False])
def test_files_and_folders_are_no_part_of_it(whole: Path, tmp_path: Path, with_index: bool) -> None:
    expected = digest(whole)
    for num_files in (2, 3):
        folder = sharded(tmp_path / f"{num_files}", checkpoint(), num_files, with_index=with_index)
        assert digest(folder) == expected
    safetensors(tmp_path / "gaps/other name.safetensors", checkpoint(), gap=24, pad=8)
    assert digest(tmp_path / "gaps") == expected
    reversed_order = dict(reversed(checkpoint().items()))
    safetensors(tmp_path / "order/model.safetensors", reversed_order)
    assert digest(tmp_path / "order") == expected
    for load_format in ("safetensors", "fastsafetensors", "instanttensor", "runai_streamer"):
        assert digest(whole, load_format=load_format) == expected


@pytest.mark.parametrize("num_bytes", [2, 64, 512, 514, 4096])
def test_a_changed_byte_of_a_sampled_tensor_is_seen(tmp_path: Path, num_bytes: int) -> None:
    tensors = checkpoint(num_bytes=num_bytes)
    path = safetensors(tmp_path / "model.safetensors", tensors)
    before, original = digest(tmp_path), path.read_bytes()
    name = "model.layers.1.self_attn.v_proj.weight"
    start = original.index(tensors[name][2])
    # A short tensor is read whole; of a long one both ends always are.
    seen = range(num_bytes) if num_bytes <= 512 else (0, 127, num_bytes - 128, num_bytes - 1)
    for at in seen:
        changed = bytearray(original)
        changed[start + at] ^= 1
        path.write_bytes(changed)
        assert digest(tmp_path) != before, at
    path.write_bytes(original)
    assert digest(tmp_path) == before


def test_windows_are_inside_and_of_bounded_length() -> None:
    for num_bytes in (*range(700), 10**6, 2**40):
        windows = weights._windows("a", num_bytes)
        assert sum(length for _, length in windows) <= weights.WINDOWS * weights.WINDOW_BYTES
        assert all(at >= 0 and at + length <= num_bytes for at, length in windows)


def test_names_types_and_shapes_are_seen(whole: Path, tmp_path: Path) -> None:
    expected = digest(whole)
    name = "model.layers.1.self_attn.k_proj.weight"
    changes: list[dict[str, tuple[str, list[int], bytes]]] = []
    for entry in (("F16", [32], content(name, 64)), ("BF16", [4, 8], content(name, 64))):
        changes.append(checkpoint() | {name: entry})
    changes.append({key: value for key, value in checkpoint().items() if key != name})
    changes.append(checkpoint() | {"model.layers.1.self_attn.k_scale": ("F32", [], bytes(4))})
    renamed = checkpoint()
    renamed["model.layers.7.self_attn.k_proj.weight"] = renamed.pop(name)
    changes.append(renamed)
    found = {expected}
    for index, tensors in enumerate(changes):
        safetensors(tmp_path / f"{index}/model.safetensors", tensors)
        found.add(digest(tmp_path / str(index)))
    assert len(found) == 1 + len(changes)


def test_every_kind_of_tensor_is_sampled(tmp_path: Path) -> None:
    """Thousands of experts do not keep the few projections of K and V out."""
    tensors = checkpoint(layers=40) | {
        f"model.layers.{layer}.mlp.experts.{expert}.up_proj.weight": ("BF16", [1], b"\0\0")
        for layer in range(40)
        for expert in range(64)
    }
    safetensors(tmp_path / "a/model.safetensors", tensors)
    tuned = {
        name: (dtype, shape, content("tuned " + name, 64) if "v_proj" in name else data)
        for name, (dtype, shape, data) in tensors.items()
    }
    safetensors(tmp_path / "b/model.safetensors", tuned)
    assert digest(tmp_path / "a") != digest(tmp_path / "b")


def test_a_file_is_read_in_bounded_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = safetensors(tmp_path / "model.safetensors", checkpoint(layers=200, num_bytes=4096))
    read: list[int] = []
    whole_length, kept = path.stat().st_size, weights._read

    def noted(file: BinaryIO, at: int, length: int) -> bytes:
        read.append(length)
        return kept(file, at, length)

    monkeypatch.setattr(weights, "_read", noted)
    digest(tmp_path)
    # The header, and samples of 1 + 2 kinds.
    (header,) = [length for length in read if length > 4096]
    samples = sum(read) - header - 8
    assert samples == (1 + 2 * weights.TENSORS_A_KIND) * 512 < whole_length // 20


def test_copies_that_the_index_does_not_name_are_not_read(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "a", checkpoint(), 2)
    expected = digest(folder)
    safetensors(folder / "copy.safetensors", checkpoint())
    assert digest(folder) == expected
    (folder / "model.safetensors.index.json").unlink()
    assert "twice" in why(folder)


def test_mistral_files_are_read_where_vllm_reads_them(whole: Path) -> None:
    plain = digest(whole)
    tensors = {"layers.0.attention.wk.weight": ("BF16", [4], bytes(8))}
    safetensors(whole / "consolidated.safetensors", tensors)
    alone = digest(whole, load_format="mistral")
    assert digest(whole, load_format="auto") == alone != plain


@pytest.mark.parametrize(
    "load_format",
    ["dummy", "tensorizer", "sharded_state", "runai_streamer_sharded", "gguf", "pt", "npcache",
     "bitsandbytes", "ipc_cache", "modelexpress", "a plugin's"],
)  # fmt: skip
def test_what_is_not_loaded_from_these_files_is_unknown(whole: Path, load_format: str) -> None:
    assert load_format in why(whole, load_format=load_format)


def test_what_is_not_there_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "no safetensors" in why(tmp_path)
    assert "hub's cache" in why(Path("nobody/no-such-model"), download_dir=str(tmp_path))
    assert "hub's cache" in why(Path("s3://bucket/model"), download_dir=str(tmp_path))
    assert "hub's cache" in why(tmp_path / "model.gguf", download_dir=str(tmp_path))
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    assert "no safetensors" in why(tmp_path)
    folder = sharded(tmp_path / "shards", checkpoint(), 2)
    (folder / "model-00002-of-00002.safetensors").unlink()
    assert "model-00002-of-00002" in why(folder)


def test_a_model_in_the_hubs_cache(tmp_path: Path) -> None:
    """By name and revision, in the cache's own layout: refs name snapshots, files are links."""
    repository = tmp_path / "models--some--model"
    digests = {}
    for commit, tensors in (("a" * 40, checkpoint()), ("b" * 40, checkpoint(num_bytes=128))):
        blob = safetensors(repository / f"blobs/{commit}", tensors)
        snapshot = repository / "snapshots" / commit
        snapshot.mkdir(parents=True)
        (snapshot / "model.safetensors").symlink_to(os.path.relpath(blob, snapshot))
        digests[commit] = digest(snapshot)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text("b" * 40)
    name, cache = Path("some/model"), str(tmp_path)
    assert digest(name, download_dir=cache) == digests["b" * 40]
    for commit, expected in digests.items():
        assert digest(name, download_dir=cache, revision=commit) == expected
    assert digests["a" * 40] != digests["b" * 40]
    assert "hub's cache" in why(name, download_dir=cache, revision="c" * 40)
    assert "its hub" in why(name, download_dir=cache, is_from_other_hub=True)


def header(head: bytes, length: int | None = None, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(head) if length is None else length) + head + data


def entry(offsets: list[Any]) -> bytes:
    return json.dumps({"a": {"dtype": "U8", "shape": [4], "data_offsets": offsets}}).encode()


HOSTILE = {
    "empty": b"",
    "shorter than a length": b"\x01\x00",
    "no header": header(b"", 0),
    "a header longer than the file": header(b"{}", 2**63),
    "a header longer than the file by one": header(b"{}", 3),
    "not JSON": header(b"}{"),
    "not UTF-8": header(b'{"\xff": 1}'),
    "deep": header(b"[" * 1_000_000),
    "deep in what is skipped": header(b'{"a":{"x":' + b"[" * 1_000_000),
    "a list": header(b"[]"),
    "no tensors": header(b'{"__metadata__": {}}'),
    "past the end": header(entry([0, 5]), data=bytes(4)),
    "backwards": header(entry([4, 0]), data=bytes(4)),
    "negative": header(entry([-1, 4]), data=bytes(4)),
    "huge": header(entry([0, 2**63]), data=bytes(4)),
    "past 64 bits": header(entry([0, 2**70]), data=bytes(4)),
    "text": header(entry(["0", "4"]), data=bytes(4)),
    "one offset": header(entry([0]), data=bytes(4)),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_what_is_no_safetensors_file_is_unknown(kind: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(HOSTILE[kind])
    start = time.monotonic()
    assert why(tmp_path)
    assert time.monotonic() - start < 2


def test_a_header_is_read_up_to_a_limit(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", weights.MAX_HEADER_BYTES + 1))
        file.truncate(weights.MAX_HEADER_BYTES * 2)
    start = time.monotonic()
    assert "a header of" in why(tmp_path)
    assert time.monotonic() - start < 0.5


@pytest.mark.parametrize("index", [b"", b"{}", b'{"weight_map": []}', b"[" * 1_000_000])
def test_an_index_that_is_none_is_unknown(whole: Path, index: bytes) -> None:
    (whole / "model.safetensors.index.json").write_bytes(index)
    assert "index.json" in why(whole)


def test_an_index_cannot_name_files_elsewhere(whole: Path, tmp_path: Path) -> None:
    safetensors(tmp_path / "elsewhere.safetensors", checkpoint())
    text = json.dumps({"weight_map": {"a": "../elsewhere.safetensors"}})
    (whole / "model.safetensors.index.json").write_text(text)
    assert "elsewhere" in why(whole)


def test_patience_ends(whole: Path) -> None:
    with pytest.raises(KvpdError, match="too long"):
        weights_digest(weight_files(Source(str(whole))), seconds=-1)


def test_a_checkpoint_of_many_tensors_takes_less_than_a_second(tmp_path: Path) -> None:
    """91,000 tensors in 30 files, as the largest mixtures of experts have."""
    tensors = {
        f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.{kind}": ("U8", [1], b"x")
        for layer in range(60)
        for expert in range(256)
        for part in ("gate", "up", "down")
        for kind in ("weight", "weight_scale_inv")
    }
    folder = sharded(tmp_path / "large", tensors, 30)
    start = time.process_time()
    assert weights_digest(weight_files(Source(str(folder))), seconds=60)
    # 0.4 s on a core of its own.
    assert time.process_time() - start < 2


# The configuration


CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000,
    "attention_bias": False,
    "sliding_window": None,
    "max_position_embeddings": 40960,
}


def fields(changes: Mapping[str, Any] = {}, **more: Any) -> dict[str, str]:
    return listed_fields(CONFIG | dict(changes), architectures=["Qwen3ForCausalLM"], **more)


def test_the_listed_fields_as_canonical_text() -> None:
    assert fields() == {
        "architectures": '["Qwen3ForCausalLM"]',
        "model_type": '"qwen3"',
        "hidden_size": "4096",
        "num_hidden_layers": "36",
        "num_key_value_heads": "8",
        "head_dim": "128",
        "rms_norm_eps": "1e-06",
        "rope": '{"rope_theta":1000000}',
    }


@pytest.mark.parametrize(
    "changes",
    [
        {"_name_or_path": "/elsewhere", "transformers_version": "4.57.1", "use_cache": True},
        {"torch_dtype": "float16", "dtype": "float16", "quantization_config": {"bits": 4}},
        {"eos_token_id": 7, "initializer_range": 0.5, "attention_dropout": 0.1},
        # What a release of transformers leaves out, another writes as not so.
        {"attention_bias": None, "use_qk_norm": False, "layer_types": [], "mlp_bias": None},
        {"rope_theta": 1000000.0},
        {"rope_theta": None, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
        {"rope_scaling": None},
        {"rope_scaling": {}},
        # Of rope that is not scaled the greatest length changes nothing.
        {"max_position_embeddings": 131072},
    ],
)
def test_what_moves_no_value_is_no_part_of_it(changes: dict[str, Any]) -> None:
    assert fields(changes) == fields()


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 10000},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        {"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.5}},
        {"partial_rotary_factor": 0.5},
        {"rms_norm_eps": 1e-05},
        {"attention_bias": True},
        {"sliding_window": 4096},
        {"layer_types": ["full_attention", "sliding_attention"]},
        {"kv_lora_rank": 512},
        {"num_kv_shared_layers": 2},
        {"head_dim": 64},
    ],
)
def test_what_decides_k_and_v_is(changes: dict[str, Any]) -> None:
    assert fields(changes) != fields()


def test_rope_of_two_releases_of_transformers_is_one() -> None:
    scaling = {"factor": 4.0, "original_max_position_embeddings": 32768}
    before = fields({"rope_scaling": scaling | {"type": "yarn"}})
    between = fields({"rope_scaling": scaling | {"type": "yarn", "rope_type": "yarn"}})
    since = {"rope_theta": 1e6, "rope_type": "yarn", **scaling}
    assert before == between == fields({"rope_theta": None, "rope_parameters": since})
    longer = fields({"rope_scaling": scaling | {"type": "yarn"}, "max_position_embeddings": 1})
    assert longer != before


def test_rope_of_layer_types() -> None:
    """As the models have it whose kinds of layers have their own."""

    def kinds(theta: float) -> dict[str, str]:
        full = {"rope_type": "default", "rope_theta": 1e6}
        local = {"rope_type": "default", "rope_theta": theta}
        return fields({"rope_parameters": {"full_attention": full, "sliding_attention": local}})

    assert kinds(10000.0) == kinds(10000) != kinds(5000.0)


def test_the_longest_sequence_chooses_the_factors_of_long_rope() -> None:
    """vLLM takes them for all sequences of an engine or for none, by --max-model-len."""
    changes = {
        "rope_scaling": {"type": "longrope", "long_factor": [2.0], "short_factor": [1.0]},
        "original_max_position_embeddings": 4096,
    }
    short, long = fields(changes, max_model_len=4096), fields(changes, max_model_len=4097)
    assert short != long
    assert fields(changes, max_model_len=131072) == long
    assert fields(max_model_len=4096) == fields(max_model_len=131072)


def test_long_values_are_shortened_and_still_told_apart() -> None:
    def of(last: int) -> str:
        kinds = ["full_attention"] * 500 + [f"kind {last}"]
        return fields({"layer_types": kinds})["layer_types"]

    assert of(1) != of(2) and len(of(1)) < 128


def test_values_that_are_no_json_are_an_error() -> None:
    for value in (float("nan"), object(), {1, 2}):
        with pytest.raises((TypeError, ValueError)):
            fields({"hidden_size": value})
