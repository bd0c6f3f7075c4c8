"""The write kernel on a real GPU: ``pytest -m gpu tests/gpu/check_write.py``.

Not collected otherwise: a machine without a GPU must not report these as passed. The comparisons
with vLLM's own kernels need vLLM for CUDA and are skipped by name without it.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from kvpd import PageFormat
from kvpd.cli.write_bench.contestants import JOBS, Engines, kvpd, separate
from kvpd.cli.write_bench.workloads import QWEN3_8B, Order, make_workload
from kvpd.convert import Pages
from kvpd.write import Norm, Rotation, prepare
from kvpd.write.launch import TritonWriter
from tests.write.cases import EPSILON, Case, check, default_matrix, set_up

pytestmark = pytest.mark.gpu

if not torch.cuda.is_available():
    pytest.skip("NO GPU: NOTHING OF THE KERNELS WAS CHECKED ON ONE", allow_module_level=True)

DEVICE = "cuda"
OF_THE_OTHER_MAKER = "float8_e4m3fn" if torch.version.hip else "float8_e4m3fnuz"
CASES = [case for case in default_matrix() if OF_THE_OTHER_MAKER not in str(case)]


@cache
def engines() -> Engines:
    return Engines(None, None)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matrix(case: Case) -> None:
    prepare_triton: Any = TritonWriter
    check(case, prepare_triton, device=DEVICE)


@pytest.mark.parametrize("num_tokens, order", [(1, "decode"), (77, "decode"), (700, "chunk")])
@pytest.mark.parametrize("job", JOBS)
def test_against_vllm(job: str, num_tokens: int, order: Order) -> None:
    """Q, K and all of the cache equal what vLLM's separate kernels leave, bit for bit."""
    workload = make_workload(QWEN3_8B, num_tokens, order, torch.device(DEVICE), layers=3)
    theirs = separate(workload, job, engines())
    if theirs is None:
        pytest.skip(f"VLLM'S KERNELS WERE NOT COMPARED: {engines().missing}")
    states = []
    tensors = [workload.memory]
    for layer in workload.layers:
        tensors += [layer.rows, layer.query_out, layer.key_out]
    before = [tensor.clone() for tensor in tensors]
    for work in (kvpd(workload, job), theirs):
        for tensor, saved in zip(tensors, before, strict=True):
            tensor.copy_(saved)
        work()
        states.append([tensor.clone().view(torch.uint8) for tensor in tensors])
    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))
    assert not torch.equal(states[0][0], before[0].view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim, rotary_dim", [(64, 64), (128, 64), (256, 256), (96, 96), (80, 20)])
@pytest.mark.parametrize("is_neox", [True, False])
def test_norm_and_rotation_against_vllm(
    dim: int, rotary_dim: int, is_neox: bool, dtype: torch.dtype
) -> None:
    """Many rows of random numbers: every last bit, for every head size."""
    if not engines().has_operators:
        pytest.skip(f"VLLM'S KERNELS WERE NOT COMPARED: {engines().missing}")
    generator = torch.Generator(DEVICE).manual_seed(dim)

    def numbers(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=DEVICE).to(dtype)

    rows, weight, table = numbers(4000, 4, dim), numbers(dim), numbers(300, rotary_dim)
    positions = torch.randint(0, 300, (4000,), generator=generator, device=DEVICE)
    expected = torch.empty_like(rows)
    torch.ops._C.rms_norm(expected, rows, weight, EPSILON)
    torch.ops._C.rotary_embedding(positions, expected, None, dim, table, is_neox)
    format = PageFormat.split_kv(heads=4, tokens=16, head_dim=dim, dtype=str(dtype)[6:])
    page = torch.zeros(1, format.page_bytes, dtype=torch.uint8, device=DEVICE)
    slots = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    out = torch.empty_like(rows)
    prepare(Pages(format, ((page,),)))(
        rows,
        rows,
        slots,
        rotation=Rotation(positions, table, is_neox),
        norm=Norm(weight, weight, EPSILON),
        key_out=out,
    )
    wrong = int((out != expected).sum())
    assert wrong == 0, f"{wrong} of {out.numel()} differ"


def test_a_graph_allocates_nothing() -> None:
    """A captured call writes again when it is replayed; nothing is allocated in it."""
    setup = set_up(CASES[0], device=DEVICE)
    untouched = setup.cache.memory.clone()
    writer = prepare(setup.cache.pages, 1)
    writer(setup.key, setup.value, setup.slots, **setup.arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        allocated = torch.cuda.memory_allocated()
        writer(setup.key, setup.value, setup.slots, **setup.arguments)
        assert torch.cuda.memory_allocated() == allocated
    setup.cache.memory.copy_(untouched)
    graph.replay()
    torch.cuda.synchronize()
    assert setup.cache.differing().size == 0
