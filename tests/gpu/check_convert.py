"""The conversion kernels on a real GPU: ``pytest -m gpu tests/gpu/check_convert.py``.

``-m 'gpu and not slow'`` is a cut of a minute: every shape once, each kind of test. Not collected
otherwise: a machine without a GPU must not report these as passed.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import triton

from kvpd import PageFormat
from kvpd.cli.convert_bench.workloads import QWEN3_8B, make_cache, make_ids
from kvpd.convert import ConversionQueue, Pages, prepare
from kvpd.convert.launch import TritonConversion
from kvpd.convert.plan import Tuning
from tests.convert.cases import Case, check, default_matrix, full_matrix, pair, set_up
from tests.convert.slot_writer import random_tokens, write_page
from tests.convert.spills import known_spill_bytes, long_pages

pytestmark = pytest.mark.gpu

if not torch.cuda.is_available():
    pytest.skip("NO GPU: NOTHING OF THE KERNELS WAS CHECKED ON ONE", allow_module_level=True)

DEVICE = "cuda"
SHAPE = pair(8, 16, 128, "bfloat16", "tiled", reverse=False)


@pytest.mark.parametrize("case", list(default_matrix()), ids=str)
def test_every_shape(case: Case) -> None:
    check(case, TritonConversion, device=DEVICE)


@pytest.mark.slow
@pytest.mark.parametrize("case", list(full_matrix()), ids=str)
def test_matrix(case: Case) -> None:
    check(case, TritonConversion, device=DEVICE)


@pytest.mark.parametrize("case", list(long_pages()), ids=str)
def test_long_pages(case: Case) -> None:
    check(case, TritonConversion, device=DEVICE)


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("head_dim", [80, 96, 192])
def test_head_sizes_that_are_no_power_of_two(head_dim: int, in_place: bool) -> None:
    specs = pair(2, 16, head_dim, "bfloat16", "tiled", reverse=False)
    check(Case(*specs, in_place, "planes", 0, torch.int32), TritonConversion, device=DEVICE)


@pytest.mark.slow
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("num_warps", [4, 16])
@pytest.mark.parametrize("tile_bytes", [4096, 65536])
@pytest.mark.parametrize("part_bytes", [8192, 32768, 65536])
@pytest.mark.parametrize("num_programs", [None, 7, 528])
@pytest.mark.parametrize("gather", [True, False])
def test_tuning_changes_no_byte(
    in_place: bool,
    num_warps: int,
    tile_bytes: int,
    part_bytes: int,
    num_programs: int | None,
    gather: bool,
) -> None:
    if in_place and part_bytes < 65536:
        num_programs = None  # parts of a page that meet must not wait for programs never launched
    tuning = Tuning(tile_bytes, part_bytes, 128, num_warps, num_programs, gather)
    case = Case(*SHAPE, in_place, "planes", 32, torch.int32, num_blocks=70)
    check(case, lambda a, b: TritonConversion(a, b, tuning), device=DEVICE)


def big(num_blocks: int) -> tuple[torch.Tensor, Pages, Pages]:
    standard, shuffled = QWEN3_8B.formats()
    target = make_cache(shuffled, QWEN3_8B.layers, num_blocks, 2, torch.device(DEVICE))
    return target.memory, target.pages.seen_as(standard), target.pages


@pytest.mark.parametrize("part_bytes", [8192, 65536])
@pytest.mark.parametrize("seed", range(10))
def test_many_pages_in_place(seed: int, part_bytes: int) -> None:
    """9,216 pages at once: programs of every phase beside each other, pages whole and in parts."""
    torch.manual_seed(seed)
    memory, source, target = big(400)
    ids = torch.randperm(400, device=DEVICE)[:256].to(torch.int32)
    before = memory.clone()
    prepare(source, target, implementation="reference")(ids, ids)
    expected = memory.clone()
    memory.copy_(before)
    conversion = TritonConversion(source, target, Tuning(part_bytes, part_bytes))
    conversion(ids, ids)
    assert torch.equal(memory, expected)
    # Counters are left as they were found: another call on the same pages is another permutation.
    assert not conversion._counters.any()


def test_unordered_programs_would_be_caught() -> None:
    """A mutant: programs of one head each that do not meet, on pages in place."""
    memory, source, target = big(400)
    ids = make_ids("random", 256, 400, torch.device(DEVICE))
    before = memory.clone()
    prepare(source, target, implementation="reference")(ids, ids)
    expected = memory.clone()
    memory.copy_(before)
    mutant = TritonConversion(source, target, Tuning(8192, 8192))
    assert mutant.constants["PARTS"] == 8
    mutant.constants["IN_PLACE"] = False
    mutant(ids, ids)
    assert not torch.equal(memory, expected)


@pytest.mark.parametrize("in_place", [True, False])
def test_addresses_beyond_two_to_the_31_elements(in_place: bool) -> None:
    """One layer whose K plane alone has 2.3e9 elements; pages at both ends of it."""
    standard_spec, shuffled_spec = SHAPE
    standard, shuffled = QWEN3_8B.formats()
    num_blocks = 140_000
    cache = make_cache(shuffled, 1, num_blocks, 2, torch.device(DEVICE))
    k_plane, v_plane = cache.pages.layers[0]
    assert k_plane.numel() // 2 > 2**31
    expected = cache.memory.clone()
    slab = make_cache(standard, 1, 8, 1, torch.device(DEVICE))
    source = cache.pages.seen_as(standard) if in_place else slab.pages
    blocks = [0, 1, 65_535, 65_536, 131_071, num_blocks - 2, num_blocks - 1]
    rng = np.random.default_rng(3)
    half = shuffled.page_bytes // 2
    planes = expected.view(2, num_blocks, half)
    for number, block in enumerate(blocks):
        k, v = random_tokens(rng, standard_spec)
        raw = torch.from_numpy(write_page(standard_spec, k, v)).cuda()
        if in_place:
            k_plane[block], v_plane[block] = raw[:half], raw[half:]
        else:
            slab.pages.layers[0][0][number] = raw
        planes[:, block] = torch.from_numpy(write_page(shuffled_spec, k, v)).cuda().view(2, half)
    ids_out = torch.tensor(blocks, dtype=torch.int64, device=DEVICE)
    ids_in = ids_out if in_place else torch.arange(len(blocks), device=DEVICE)
    TritonConversion(source, cache.pages)(ids_in, ids_out)
    assert torch.equal(cache.memory, expected)


def test_no_allocation_and_no_synchronisation() -> None:
    _, source, target = big(64)
    conversion = prepare(source, target)
    conversion.warm_up()
    ids = make_ids("random", 40, 64, torch.device(DEVICE))
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        conversion(ids, ids)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@pytest.mark.parametrize("heads", [8, 32])
def test_cuda_graph(heads: int) -> None:
    """Captured once; what is converted on replay is what the id tensor then holds."""
    specs = pair(heads, 16, 128, "bfloat16", "tiled", reverse=False)
    setup = set_up(Case(*specs, True, "planes", 0, torch.int32, num_blocks=30), device=DEVICE)
    conversion = TritonConversion(setup.source, setup.target.pages)
    conversion.warm_up()
    ids = torch.full_like(setup.target_ids, -1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        conversion(ids, ids)
    before = setup.target.memory.clone()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(before, setup.target.memory), "padding ids converted something"
    ids.copy_(setup.target_ids)
    graph.replay()
    torch.cuda.synchronize()
    assert setup.target.differing().size == 0


def test_queue_waits_for_the_submitting_stream_and_never_reuses_ids_in_flight() -> None:
    """120 requests of one page through three slots, each filled on the stream just before."""
    standard, shuffled = QWEN3_8B.formats()
    device = torch.device(DEVICE)
    target = make_cache(shuffled, QWEN3_8B.layers, 130, 2, device)
    slab = make_cache(standard, QWEN3_8B.layers, 120, 1, device)
    raw = slab.memory.clone()
    expected = make_cache(shuffled, QWEN3_8B.layers, 130, 2, device)
    expected.memory.copy_(target.memory)
    order = np.random.default_rng(5).permutation(130)[:120].astype(np.int32)
    ids_in = torch.arange(120, device=device)
    prepare(slab.pages, expected.pages, implementation="reference")(
        ids_in, torch.from_numpy(order).to(device).long()
    )
    conversion = prepare(slab.pages, target.pages)
    conversion.warm_up()
    queue = ConversionQueue(device, num_slots=3, max_ids=4)
    slab.memory.zero_()
    torch.cuda.synchronize()
    per_layer = raw.view(QWEN3_8B.layers, 120, -1)
    completions = []
    for page in range(120):
        for layer, (piece,) in enumerate(slab.pages.layers):
            piece[page].copy_(per_layer[layer, page])
        ids = np.array([page], dtype=np.int32)
        completions.append(queue.submit(conversion, ids, order[page : page + 1]))
    while not all(completion.done() for completion in completions):
        pass
    assert torch.equal(target.memory, expected.memory)
    # Longer than a slot: several launches, one completion.
    all_pages = np.arange(120, dtype=np.int32)
    completion = queue.submit(conversion, all_pages, order)
    while not completion.done():
        pass
    assert torch.equal(target.memory, expected.memory)


@pytest.mark.parametrize(
    "matrix", [default_matrix, pytest.param(full_matrix, marks=pytest.mark.slow)]
)
def test_default_kernels_spill_no_more_than_is_known(matrix: Callable[[], Iterator[Case]]) -> None:
    """With default tuning, but for what is known to spill (tests/convert/spills.py)."""
    for case in [*matrix(), *long_pages()]:
        setup = set_up(replace(case, num_layers=1, num_blocks=3), device=DEVICE)
        ids = torch.full_like(setup.target_ids, -1)
        conversion = TritonConversion(setup.source, setup.target.pages)
        conversion(ids, ids)
        (kernel,) = conversion._compiled.values()
        kernel._init_handles()
        # Triton counts 4-byte registers.
        assert 4 * kernel.n_spills <= known_spill_bytes(case, triton.__version__), case


@pytest.mark.slow
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_compute_sanitizer(tool: str) -> None:
    """A few conversions of each kind under NVIDIA's checker, where it is installed."""
    program = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(program).is_file():
        pytest.skip(f"compute-sanitizer IS NOT INSTALLED: {tool} DID NOT RUN")
    done = subprocess.run(
        [program, "--tool", tool, "--error-exitcode", "9", sys.executable, "-m", __package__],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_formats_are_the_ones_meant() -> None:
    assert (
        PageFormat.standard(heads=8, tokens=16, head_dim=128, dtype="bfloat16")
        == (QWEN3_8B.formats()[0])
    )
