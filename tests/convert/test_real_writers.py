"""The engines' own cache writers as oracles: tokens they write equal tokens that we convert.

Their source is read from an installed or unpacked package, never kept here. Without one these tests
are skipped; `make writers` unpacks both into ``target/writers``.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvpd import MissingDependencyError
from kvpd.cli.convert_bench.writer import load_kernel, write_tokens, writer_source
from kvpd.convert.host import HostConversion
from kvpd.convert.reference import ReferenceConversion
from tests.convert.caches import make_cache, page_format
from tests.convert.interpreter import TritonConversion, interpreting
from tests.convert.slot_writer import UNSIGNED, write_page
from tests.oracle.pages import Spec

WRITERS = Path(__file__).parents[2] / "target" / "writers"
VLLM = WRITERS / "vllm" / "v1" / "attention" / "backends" / "rocm_aiter_fa.py"
AITER = Path("aiter") / "ops" / "triton" / "_triton_kernels" / "fused_kv_cache.py"
NUM_BLOCKS, NUM_PAGES = 6, 4
SHAPES = [(2, 16, 64, "bfloat16"), (3, 32, 128, "float8_e4m3fn"), (1, 16, 128, "float16")]
KINDS = pytest.mark.parametrize("kind", [HostConversion, ReferenceConversion, TritonConversion])


def vllm_kernel() -> Any:
    try:
        source = writer_source(VLLM if VLLM.is_file() else None)
    except MissingDependencyError as error:
        pytest.skip(f"VLLM'S WRITER WAS NOT COMPARED: {error}")
    with interpreting():
        return load_kernel(source)


def aiter_kernel() -> Any:
    found = WRITERS / AITER
    if not found.is_file():
        spec = importlib.util.find_spec("aiter")
        folders = list(spec.submodule_search_locations or ()) if spec is not None else []
        files = [Path(folder).parent / AITER for folder in folders]
        if not files or not files[0].is_file():
            pytest.skip("AITER'S WRITER WAS NOT COMPARED: no amd-aiter, make writers unpacks it")
        found = files[0]
    with interpreting():
        return load_kernel(found, "_fused_qk_rope_reshape_and_cache_kernel")


def finite_tokens(rng: np.random.Generator, spec: Spec) -> np.ndarray[Any, Any]:
    """k and v of [2, pages * N, H, D]: normal numbers only, others may change in arithmetic."""
    shape = (2, NUM_PAGES * spec.tokens, spec.heads, spec.head_dim)
    any_bits = rng.integers(0, 2 ** (8 * spec.element_bytes), shape, dtype=np.uint32)
    bits: np.ndarray[Any, Any] = any_bits.astype(UNSIGNED[spec.element_bytes])
    if spec.element_bytes == 2:
        # Without the exponent's highest bit and with its lowest.
        lowest = 0x0400 if spec.dtype == "float16" else 0x0080
        bits = bits & 0xBFFF | lowest
    return bits


def converted(spec: Spec, tokens: Any, blocks: Any, kind: Any, v: str) -> torch.Tensor:
    """A cache of zeros after tokens were written as standard pages and converted in place."""
    rng = np.random.default_rng(0)
    shuffled = Spec("aiter-shuffle", v, spec.heads, spec.tokens, spec.head_dim, spec.dtype)
    format = page_format(shuffled)
    cache = make_cache(rng, format, holding="planes", num_layers=1, num_blocks=NUM_BLOCKS)
    cache.image[:] = 0
    of_page = tokens.reshape(2, NUM_PAGES, spec.tokens, spec.heads, spec.head_dim)
    for page, block in enumerate(blocks):
        cache.write(0, int(block), write_page(spec, of_page[0, page], of_page[1, page]))
    cache.upload()
    ids = torch.tensor(blocks, dtype=torch.int32)
    kind(cache.pages.seen_as(page_format(spec)), cache.pages)(ids, ids)
    return torch.stack([piece.contiguous() for piece in cache.pages.layers[0]])


@KINDS
@pytest.mark.parametrize("heads, tokens, head_dim, dtype", SHAPES)
def test_vllm(kind: Any, heads: int, tokens: int, head_dim: int, dtype: str) -> None:
    """K [H, D/x, N, x] and V [H, N/x, D, x]."""
    kernel = vllm_kernel()
    rng = np.random.default_rng(1)
    spec = Spec("standard", "HNC", heads, tokens, head_dim, dtype)
    written = finite_tokens(rng, spec)
    blocks = rng.permutation(NUM_BLOCKS)[:NUM_PAGES]
    slots = (blocks[:, None] * tokens + np.arange(tokens)).reshape(-1)
    integers = {1: torch.int8, 2: torch.int16}[spec.element_bytes]
    planes = torch.zeros((2, NUM_BLOCKS, heads * tokens * head_dim), dtype=integers)
    key, value = torch.from_numpy(written).view(integers)
    write_tokens(kernel, key, value, planes[0], planes[1], torch.from_numpy(slots), tokens)
    assert planes.count_nonzero() > planes.numel() // 3
    ours = converted(spec, written, blocks, kind, "tiled")
    assert torch.equal(planes.view(torch.uint8), ours)


@KINDS
@pytest.mark.parametrize("heads, tokens, head_dim, dtype", [SHAPES[0], SHAPES[2]])
def test_aiter(kind: Any, heads: int, tokens: int, head_dim: int, dtype: str) -> None:
    """K [H, D/x, N, x] and the transposed V [H, D, N]; no queries, so keys are not rotated."""
    kernel = aiter_kernel()
    rng = np.random.default_rng(2)
    spec = Spec("standard", "HNC", heads, tokens, head_dim, dtype)
    written = finite_tokens(rng, spec)
    blocks = rng.permutation(NUM_BLOCKS)[:NUM_PAGES]
    slots = torch.from_numpy((blocks[:, None] * tokens + np.arange(tokens)).reshape(-1))
    floats = torch.float16 if dtype == "float16" else torch.bfloat16
    key, value = torch.from_numpy(written.view(np.int16)).view(floats)
    planes = torch.zeros((2, NUM_BLOCKS, heads * tokens * head_dim), dtype=floats)
    x = 8
    k_cache = planes[0].view(NUM_BLOCKS, heads, head_dim // x, tokens, x)
    v_cache = planes[1].view(NUM_BLOCKS, heads, head_dim, tokens)
    out = torch.empty_like(key)
    arguments: dict[str, Any] = {
        **dict.fromkeys(kernel.arg_names, 0),
        "q_ptr": key,
        "k_ptr": key,
        "v_ptr": value,
        "pos_ptr": slots,
        "cos_ptr": key,
        "sin_ptr": key,
        "offs_ptr": slots,
        "key_cache_ptr": k_cache,
        "value_cache_ptr": v_cache,
        "slot_mapping_ptr": slots,
        "q_out_ptr": out,
        "k_out_ptr": out,
        "zeros_out_ptr": out,
        "T": 0,
        "T_slot": len(slots),
        "k_scale_ptr": None,
        "v_scale_ptr": None,
        "QH_PER_KH": 1,
        "QH": heads,
        "KH": heads,
        "REUSE_FREQS_FRONT_PART": True,
        "IS_NEOX": True,
        "BLOCK_D_pe": head_dim,
        "BLOCK_D_HALF_pe": head_dim // 2,
        "BLOCK_SIZE": tokens,
        "X_SIZE": x,
        "FLASH_LAYOUT": False,
        "HAVE_POS": False,
        "HAVE_K_SCALE": False,
        "HAVE_V_SCALE": False,
        "HAVE_ZEROS": False,
    }
    for name, tensor in (("k", key), ("v", value), ("k_out", out)):
        for axis, stride in zip("thd", tensor.stride(), strict=True):
            arguments[f"{name}_stride_{axis}"] = stride
    for axis, stride in zip("thdbx", k_cache.stride(), strict=True):
        arguments[f"key_cache_stride_{axis}"] = stride
    for axis, stride in zip("thdb", v_cache.stride(), strict=True):
        arguments[f"value_cache_stride_{axis}"] = stride
    kernel[(len(slots) * heads, 1, 1)](**arguments)
    assert planes.count_nonzero() > planes.numel() // 3
    ours = converted(spec, written, blocks, kind, "transposed")
    assert torch.equal(planes.view(torch.uint8), ours)


def test_a_converter_of_the_other_v_would_be_caught() -> None:
    """The two V variants differ, so the writers tell them apart."""
    spec = Spec("standard", "HNC", 2, 16, 64, "bfloat16")
    tokens = finite_tokens(np.random.default_rng(3), spec)
    blocks = np.arange(NUM_PAGES)
    tiled, transposed = (
        converted(spec, tokens, blocks, ReferenceConversion, v) for v in ("tiled", "transposed")
    )
    assert torch.equal(tiled[0], transposed[0]) and not torch.equal(tiled[1], transposed[1])
