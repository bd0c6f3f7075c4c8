"""The hooks of vLLM's fusion passes, called directly: on CPUs vLLM does not import the passes.

What they leave is compared with vLLM's own rotary embedding and norm, and with the backend's own
cache update, run one after the other.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from kvpd import KvpdError
from kvpd.vllm.plugin import SWITCH, register_fused_writers

pytestmark = [pytest.mark.vllm, pytest.mark.core]

HEADS, KV_HEADS, DIM, TOKENS, ROWS = 4, 2, 64, 16, 9
EPSILON = 1e-6


class Scales:
    """Of an attention layer, all that a writer asks for."""

    _k_scale = torch.tensor(1.0)
    _v_scale = torch.tensor(1.0)


def implementation(name: str) -> Any:
    from tests.vllm.backends import BACKENDS

    backend: Any = BACKENDS[name]
    return backend.get_impl_cls()(HEADS, DIM, 0.125, KV_HEADS)


def cache(is_lhbnc: bool) -> torch.Tensor:
    """Shuffled pages [blocks, 2, N, H*D], poisoned; the planes together or each block's."""
    shape = (6, 2, TOKENS, KV_HEADS * DIM)
    memory = torch.randn(2, 6, *shape[2:]) if is_lhbnc else torch.randn(shape)
    memory = memory.to(torch.bfloat16)
    return memory.transpose(0, 1) if is_lhbnc else memory


def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """QKV rows, slots with padding, positions, and the table of a rotary embedding."""
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(ROWS, (HEADS + 2 * KV_HEADS) * DIM, generator=generator)
    slots = torch.randperm(6 * TOKENS, generator=generator)[:ROWS]
    slots[3] = -1
    positions = torch.randint(0, 128, (ROWS,), generator=generator)
    angles = torch.arange(128.0)[:, None] * 10000.0 ** -torch.linspace(0, 1, DIM // 2)
    table = torch.cat((angles.cos(), angles.sin()), dim=-1)
    return qkv.to(torch.bfloat16), slots, positions, table.to(torch.bfloat16)


def parts(qkv: torch.Tensor) -> list[torch.Tensor]:
    heads = (HEADS, KV_HEADS, KV_HEADS)
    split = qkv.split([number * DIM for number in heads], dim=-1)
    return [part.view(ROWS, number, DIM) for part, number in zip(split, heads, strict=True)]


@pytest.fixture
def operators() -> Any:
    """vLLM's compiled kernels for CPUs."""
    importlib.import_module("vllm._custom_ops")
    return torch.ops._C


def rotate(
    operators: Any,
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    table: torch.Tensor,
    is_neox: bool,
) -> None:
    """In place, by vLLM's kernel; it takes heads side by side."""
    flat = [rows.flatten(1).contiguous() for rows in (query, key)]
    operators.rotary_embedding(positions, *flat, DIM, table, is_neox)
    for rows, turned in zip((query, key), flat, strict=True):
        rows.copy_(turned.view(rows.shape))


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("is_lhbnc", [True, False])
def test_rope(operators: Any, is_lhbnc: bool, is_neox: bool) -> None:
    qkv, slots, positions, table = batch()
    own, stock = qkv.clone(), qkv.clone()
    pages = cache(is_lhbnc)
    expected = pages.clone()
    impl = implementation("fused")
    assert impl.fused_rope_kvcache_supported()
    impl.do_rope_and_kv_cache_update(Scales(), *parts(own), positions, table, is_neox, pages, slots)
    query, key, value = parts(stock)
    rotate(operators, positions, query, key, table, is_neox)
    implementation("shuffled").do_kv_cache_update(Scales(), key, value, expected, slots)
    assert torch.equal(own, stock) and not torch.equal(own, qkv)
    assert torch.equal(pages, expected)


def test_qk_norm(operators: Any) -> None:
    """Multiples of 1/4 below 4: their squares add up exactly, in whatever order."""
    qkv, slots, positions, table = batch()
    qkv = (qkv * 4).round().clamp(-15, 15) / 4
    weights = [(1 + torch.arange(DIM) / scale).to(torch.bfloat16) for scale in (64, 32)]
    pages = cache(True)
    expected = pages.clone()
    impl = implementation("fused")
    assert impl.fused_qk_norm_rope_kvcache_supported()
    query_out = torch.full((ROWS, HEADS, DIM), torch.nan, dtype=torch.bfloat16)
    key_out = torch.full((ROWS, KV_HEADS, DIM), torch.nan, dtype=torch.bfloat16)
    before = qkv.clone()
    impl.do_qk_norm_rope_kvcache_update(
        Scales(), qkv, query_out, key_out, positions, *weights, EPSILON, table, True, pages, slots
    )
    assert torch.equal(qkv, before)
    query, key, value = (part.contiguous() for part in parts(qkv))
    for rows, weight in zip((query, key), weights, strict=True):
        operators.rms_norm(rows, rows.clone(), weight, EPSILON)
    rotate(operators, positions, query, key, table, True)
    implementation("shuffled").do_kv_cache_update(Scales(), key, value, expected, slots)
    assert torch.equal(query_out, query) and torch.equal(key_out, key)
    assert torch.equal(pages, expected)


def test_write_alone() -> None:
    qkv, slots, _, _ = batch()
    _, key, value = parts(qkv)
    pages = cache(True)
    expected = pages.clone()
    implementation("fused").do_kv_cache_update(Scales(), key, value, pages, slots)
    implementation("shuffled").do_kv_cache_update(Scales(), key, value, expected, slots)
    assert torch.equal(pages, expected)


def test_a_cache_that_is_made_anew() -> None:
    """Sleep and wake-up give a layer other memory: the old must not be written any more."""
    qkv, slots, _, _ = batch()
    _, key, value = parts(qkv)
    impl = implementation("fused")
    first, second = cache(True), cache(True)
    impl.do_kv_cache_update(Scales(), key, value, first, slots)
    before, untouched = first.clone(), second.clone()
    impl.do_kv_cache_update(Scales(), key, value, second, slots)
    assert torch.equal(first, before) and not torch.equal(second, untouched)


def test_an_unknown_cache_type_is_the_backends_own() -> None:
    impl = implementation("fused")
    impl.kv_cache_dtype = "fp8_e5m2"
    assert not impl.fused_rope_kvcache_supported()
    assert not impl.fused_qk_norm_rope_kvcache_supported()


def test_aiter_answers_for_shuffled_pages_only(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm._aiter_ops import rocm_aiter_ops
    from vllm.v1.attention.backends.rocm_aiter_fa import AiterFlashAttentionBackend

    from kvpd.vllm.adapter import aiter_fa

    backend: Any = aiter_fa.FusedAiterFlashAttentionBackend
    assert backend.full_cls_name() == AiterFlashAttentionBackend.full_cls_name()
    impl = backend.get_impl_cls().__new__(backend.get_impl_cls())
    impl.num_heads, impl.num_kv_heads, impl.head_size = HEADS, KV_HEADS, DIM
    impl.kv_cache_dtype = "auto"
    for is_shuffled in (False, True):
        monkeypatch.setattr(
            rocm_aiter_ops, "is_shuffle_kv_cache_enabled", lambda on=is_shuffled: on
        )
        assert impl.fused_rope_kvcache_supported() == is_shuffled
        assert impl.fused_qk_norm_rope_kvcache_supported() == is_shuffled
    impl.kv_cache_dtype = "fp8"
    for has_scales in (False, True):
        monkeypatch.setattr(aiter_fa, "_HAS_SCALES", has_scales)
        assert impl.fused_rope_kvcache_supported() == has_scales
    impl.kv_cache_dtype = "auto"
    # What AITER FA is given there: its own shape and slots.
    qkv, slots, positions, table = batch()
    pages = cache(True)
    expected = pages.clone()
    query, key, value = parts(qkv)
    impl.do_rope_and_kv_cache_update(
        Scales(), query, key, value, positions, table, True, pages, slots
    )
    implementation("shuffled").do_kv_cache_update(Scales(), key, value, expected, slots)
    assert torch.equal(pages, expected)


def test_the_switch_on() -> None:
    """In a process of its own: AITER FA is kvpd's, and compiled graphs have another key."""
    code = (
        "from kvpd.vllm.plugin import register_fused_writers\n"
        "register_fused_writers(); register_fused_writers()\n"
        "from vllm import envs\n"
        "from vllm.v1.attention.backends.registry import AttentionBackendEnum as Backend\n"
        "path = Backend.ROCM_AITER_FA.get_path()\n"
        f"print(path.startswith('kvpd.'), '{SWITCH}' in envs.compile_factors())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {SWITCH: "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split()[-2:] == ["True", "True"]


@pytest.mark.parametrize("value", ["0", "", None])
def test_the_switch_off(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import envs
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    if value is None:
        monkeypatch.delenv(SWITCH, raising=False)
    else:
        monkeypatch.setenv(SWITCH, value)
    register_fused_writers()
    assert AttentionBackendEnum.ROCM_AITER_FA.get_path().startswith("vllm.")
    assert SWITCH not in envs.compile_factors()


def test_an_unknown_vllm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvpd.vllm.adapter import aiter_fa

    monkeypatch.setattr(aiter_fa, "vllm_version", "0.29.1")
    with pytest.raises(KvpdError) as caught:
        aiter_fa.register()
    assert (caught.value.code, caught.value.got) == ("unsupported-version", "0.29.1")


def test_a_switch_that_is_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "yes")
    with pytest.raises(KvpdError) as caught:
        register_fused_writers()
    assert (caught.value.code, caught.value.field) == ("switch-value", SWITCH)


def test_vllm_finds_the_plugin() -> None:
    from importlib.metadata import entry_points

    (found,) = (
        point
        for point in entry_points(group="vllm.general_plugins")
        if point.name == "kvpd_fused_writers"
    )
    assert found.load() is register_fused_writers
