"""The Triton kernels in the interpreter, over the same matrix as the reference."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kvpd import ConversionError, PageFormat
from kvpd.convert import Pages
from kvpd.convert.plan import DIRECT, IN_PLACE, OUT_OF_PLACE, Tuning, plan_kernel
from tests.convert.caches import Holding
from tests.convert.cases import Case, check, default_matrix, full_matrix, pair, set_up
from tests.convert.interpreter import TritonConversion, kernels, launch


@pytest.mark.parametrize("case", list(default_matrix()), ids=str)
def test_shapes(case: Case) -> None:
    check(case, TritonConversion)


@pytest.mark.slow
@pytest.mark.parametrize("case", list(full_matrix()), ids=str)
def test_matrix(case: Case) -> None:
    check(case, TritonConversion)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize(
    "heads, tokens, head_dim, dtype",
    [(16, 32, 256, "bfloat16"), (8, 32, 256, "float32"), (10, 32, 256, "bfloat16")],
)
def test_long_pages(
    heads: int, tokens: int, head_dim: int, dtype: str, in_place: bool, reverse: bool
) -> None:
    """Pages of 512 and 320 KiB: several parts on a GPU, one program here, which runs alone."""
    source, target = pair(heads, tokens, head_dim, dtype, "tiled", reverse=reverse)
    case = Case(source, target, in_place, "joint", 0, torch.int32, num_layers=1, num_blocks=4)

    def prepare(source_pages: Pages, target_pages: Pages) -> TritonConversion:
        conversion = TritonConversion(source_pages, target_pages)
        assert conversion.plan.num_tiles > 1
        assert (conversion.constants["PARTS"] == 1) == in_place
        return conversion

    check(case, prepare)


SHAPE = pair(4, 16, 64, "bfloat16", "tiled", reverse=False)
TUNINGS = [
    Tuning(4096, 16384),
    Tuning(8192, 8192),
    Tuning(4096, 8192, num_programs=3),
    Tuning(16384, 16384, gather=True),
    Tuning(16384, 16384, num_programs=1),
    Tuning(4096, 4096, num_programs=1000, num_warps=8),
    DIRECT,
]


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("tuning", TUNINGS, ids=str)
def test_tuning_changes_no_byte(tuning: Tuning, in_place: bool) -> None:
    case = Case(*SHAPE, in_place, "planes", 32, torch.int32)
    check(case, lambda source, target: TritonConversion(source, target, tuning))


@pytest.mark.parametrize("head_dim", [80, 96, 192])
@pytest.mark.parametrize("in_place", [True, False])
def test_head_sizes_that_are_no_power_of_two(head_dim: int, in_place: bool) -> None:
    """Vectors are padded to a power of two and masked."""
    specs = pair(2, 16, head_dim, "bfloat16", "tiled", reverse=False)
    check(Case(*specs, in_place, "planes", 0, torch.int32), TritonConversion)


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("reverse", [False, True])
def test_pages_cut_by_heads(in_place: bool, reverse: bool) -> None:
    """Packed pages of four heads in four regions: more pieces than the two fast paths know."""
    source, target = pair(4, 16, 64, "bfloat16", "tiled", reverse=reverse)
    holding: Holding = "heads" if target.family == "standard" else "planes"
    check(Case(source, target, in_place, holding, 48, torch.int64), TritonConversion)


def test_plan_is_keyed_by_content() -> None:
    """The compiler's caches see a plan only through its hash, equality and repr."""
    shape: dict[str, Any] = {"heads": 4, "tokens": 16, "head_dim": 64}
    keys = set()
    for dtype in ("bfloat16", "float8_e4m3fn"):
        for variant in ("tiled", "transposed"):
            v: Any = variant
            standard = PageFormat.standard(**shape, dtype=dtype)
            shuffled = PageFormat.aiter_shuffle(**shape, dtype=dtype, v=v)
            for a, b in ((standard, shuffled), (shuffled, standard)):
                for tuning in (IN_PLACE, OUT_OF_PLACE, Tuning(4096, 4096)):
                    plan = plan_kernel(a, b, tuning)
                    again = plan_kernel(a, b, tuning)
                    assert plan == again and hash(plan) == hash(again) and repr(plan) == repr(again)
                    keys.add((repr(plan), plan.components, plan.num_tiles))
    assert len({key for key, _, _ in keys}) == len(keys) > 10


def test_convert_twice_by_one_conversion() -> None:
    """Tables are built once; a second call converts other pages."""
    setup = set_up(Case(*SHAPE, False, "planes", 0, torch.int32))
    conversion = TritonConversion(setup.source, setup.target.pages)
    for position in range(setup.source_ids.numel()):
        one = slice(position, position + 1)
        conversion(setup.source_ids[one], setup.target_ids[one])
    assert setup.target.differing().size == 0


def test_warm_up_writes_nothing() -> None:
    setup = set_up(Case(*SHAPE, True, "planes", 0, torch.int32))
    before = setup.target.memory.clone()
    TritonConversion(setup.target.pages.seen_as(setup.source.format), setup.target.pages).warm_up()
    assert torch.equal(before, setup.target.memory)


def test_short_runs_are_refused() -> None:
    """Tokens of 8 bytes leave no 16 contiguous bytes to load."""
    shape: dict[str, Any] = {"heads": 2, "tokens": 8, "head_dim": 64, "dtype": "float8_e4m3fn"}
    standard, split = PageFormat.standard(**shape), PageFormat.split_kv(**{**shape, "head_dim": 64})
    assert plan_kernel(standard, split, OUT_OF_PLACE).num_tiles >= 1
    shape["head_dim"] = 8
    standard, split = PageFormat.standard(**shape), PageFormat.split_kv(**shape)
    with pytest.raises(ConversionError) as caught:
        plan_kernel(standard, split, OUT_OF_PLACE)
    assert caught.value.code in ("short-run", "unaligned-offset")


class FakeCompiled:
    """In place of a compiled kernel, which takes addresses: the interpreter on what lies there."""

    def __init__(self, conversion: TritonConversion) -> None:
        self.conversion = conversion
        self.streams: list[object] = []

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        of = self.conversion

        def run(*arguments: Any, stream: object) -> None:
            *tables, source, target, counters, num_ids, num_work = arguments[:7]
            assert tables == [of._source_table.data_ptr(), of._target_table.data_ptr()]
            assert counters == of._counters.data_ptr()
            assert len(arguments) == 7 + len(of.constants)
            self.streams.append(stream)
            ids = [torch.from_numpy(int32_at(address, num_ids)) for address in (source, target)]
            kernels.convert_kernel[grid](
                of._source_table, of._target_table, *ids, of._counters, num_ids, num_work,
                **of.constants,
            )  # fmt: skip

        return run


def int32_at(address: int, count: int) -> NDArray[np.int32]:
    return np.ctypeslib.as_array((ctypes.c_int32 * count).from_address(address))


@pytest.mark.parametrize("in_place", [False, True])
def test_ids_that_stay_in_host_memory(monkeypatch: pytest.MonkeyPatch, in_place: bool) -> None:
    """Their addresses lead to the right pages, on the stream that was named; or nothing happens."""
    setup = set_up(Case(*SHAPE, in_place, "planes", 0, torch.int32))
    source = setup.target.pages.seen_as(setup.source.format) if in_place else setup.source
    conversion = TritonConversion(source, setup.target.pages, Tuning(4096, 16384))
    sides = [setup.target_ids] if in_place else [setup.target_ids, setup.source_ids]
    ids, count = torch.cat(sides), setup.target_ids.numel()
    stream: Any = SimpleNamespace(cuda_stream=0x57)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    assert not conversion.enqueue_with_host_ids(ids, count, stream), "nothing was compiled yet"
    compiled = FakeCompiled(conversion)
    conversion._compiled[torch.int32] = compiled
    for place, name, value in (
        (torch.version, "hip", "6.4"),  # not tried there
        (launch, "_MAX_HOST_READS", 1),  # many programs would each read over PCIe
        (torch.cuda, "current_device", lambda: 1),  # where Triton would launch
    ):
        with monkeypatch.context() as now:
            now.setattr(place, name, value)
            assert not conversion.enqueue_with_host_ids(ids, count, stream)
    assert compiled.streams == [] and setup.target.differing().size > 0
    assert conversion.enqueue_with_host_ids(ids, count, stream)
    assert compiled.streams == [0x57] and setup.target.differing().size == 0
