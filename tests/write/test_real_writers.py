"""The engines' own cache writers as oracles: a batch they write equals one that we write.

Their source is read from an installed or unpacked package, never kept here; without one these tests
are skipped. Rotation and norm are compared with vLLM's kernels for CPUs in tests/vllm/test_fused.py
and with those for GPUs in tests/gpu/check_write.py.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from kvpd import PageFormat
from kvpd.cli.convert_bench.writer import load_kernel
from kvpd.convert import Pages
from kvpd.write import Scales
from tests.convert.interpreter import interpreting
from tests.convert.test_real_writers import VLLM
from tests.write.interpreter import TritonWriter, rounding

VLLM33 = Path(__file__).parents[2] / "target" / "vllm-0.33.0"
MODULE = Path("v1") / "attention" / "backends" / "rocm_aiter_fa.py"
FLASH = Path("v1") / "attention" / "ops" / "triton_reshape_and_cache_flash.py"
HEADS, DIM, BLOCKS, ROWS = 3, 64, 5, 21
DTYPES = pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])


def kernel_of(file: Path | None, name: str) -> Any:
    if file is None or not file.is_file():
        pytest.skip(f"VLLM'S WRITER WAS NOT COMPARED: no {name}")
    with interpreting():
        return load_kernel(file, name)


def installed(module: Path) -> Path | None:
    spec = importlib.util.find_spec("vllm")
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    return Path(folders[0]) / module if folders else None


def batch(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Scales]:
    """K and V, slots of a chunk that begins inside a page, with padding, and scales."""
    generator = torch.Generator().manual_seed(tokens)
    rows = torch.randn(2, ROWS, HEADS, DIM, generator=generator).to(torch.bfloat16)
    blocks = torch.randperm(BLOCKS, generator=generator)
    slots = (blocks[:, None] * tokens + torch.arange(tokens)).reshape(-1)[5 : 5 + ROWS].clone()
    slots[-2] = -1
    return rows[0], rows[1], slots, Scales(torch.tensor([0.07]), torch.tensor([0.011]))


@pytest.mark.parametrize("tokens", [16, 32])
@pytest.mark.parametrize("release", ["0.32", "0.33"])
@DTYPES
def test_vllms_shuffle_writer(dtype: str, release: str, tokens: int) -> None:
    """K [H, D/x, N, x] and V [H, N/x, D, x]; up to 0.32 without a layer's scales."""
    folder = VLLM33 / "vllm" if release == "0.33" else VLLM.parents[3]
    kernel = kernel_of(folder / MODULE, "reshape_and_cache_shuffle_kernel")
    key, value, slots, scales = batch(tokens)
    if release == "0.32":
        scales = Scales(torch.ones(1), torch.ones(1))
    kept = getattr(torch, dtype)
    format = PageFormat.aiter_shuffle(heads=HEADS, tokens=tokens, head_dim=DIM, dtype=dtype)
    planes = torch.randint(0, 256, (2, BLOCKS, format.plane_bytes[0]), dtype=torch.uint8)
    expected = planes.clone()
    k_cache, v_cache = expected.view(kept)
    with rounding():
        kernel[(ROWS, HEADS)](
            key, value, k_cache, v_cache, slots, scales.key, scales.value,
            16 // kept.itemsize, key.stride(0), value.stride(0),
            k_cache.stride(0), v_cache.stride(0), tokens, DIM, HEADS,
            BLOCK_SIZE=DIM, QUANT=kept.itemsize == 1,
        )  # fmt: skip
        TritonWriter(Pages(format, (tuple(planes),)), 0)(key, value, slots, scales=scales)
    assert torch.equal(planes, expected)


@pytest.mark.parametrize("interior", ["HNC", "NHC"])
@DTYPES
def test_vllms_packed_writer(dtype: str, interior: Any) -> None:
    """Per block [H, N, 2*D] or [N, H, 2*D]."""
    kernel = kernel_of(installed(FLASH), "reshape_and_cache_kernel_flash")
    tokens = 16
    key, value, slots, scales = batch(tokens)
    kept = getattr(torch, dtype)
    format = PageFormat.standard(
        heads=HEADS, tokens=tokens, head_dim=DIM, dtype=dtype, interior=interior
    )
    pages = torch.randint(0, 256, (BLOCKS, format.page_bytes), dtype=torch.uint8)
    expected = pages.clone()
    outer = (HEADS, tokens) if interior == "HNC" else (tokens, HEADS)
    cache = expected.view(kept).view(BLOCKS, *outer, 2 * DIM)
    if interior == "HNC":
        cache = cache.transpose(1, 2)
    k_cache, v_cache = cache.split(DIM, dim=-1)  # [blocks, tokens, heads, D] each
    with rounding():
        kernel[(ROWS, 1)](
            key, value, k_cache, v_cache, slots, scales.key, scales.value,
            key.stride(0), value.stride(0), k_cache.stride(0), k_cache.stride(2), 0, 0,
            k_cache.stride(1),
            num_heads=HEADS, head_size=DIM, block_size=tokens, x=1,
            USE_HEAD_MAJOR_LAYOUT=False, INTERLEAVED_V_PACK_FACTOR=0,
            FP8_KV_CACHE=kept.itemsize == 1, TILE_SIZE=256,
        )  # fmt: skip
        TritonWriter(Pages(format, ((pages,),)), 0)(key, value, slots, scales=scales)
    assert torch.equal(pages, expected)
