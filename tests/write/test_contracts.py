"""What a writer refuses, and in which words."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kvpd import PageFormat, WriteError
from kvpd._kvpd import Component
from kvpd.convert import Pages
from kvpd.write import Norm, Rotation, Scales, prepare
from kvpd.write.plan import Work, WriteTuning, key_and_value, plan_write
from tests.convert.caches import make_cache, page_format
from tests.oracle.pages import Spec
from tests.write.interpreter import TritonWriter

SPEC = Spec("aiter-shuffle", "tiled", 2, 16, 64, "bfloat16")
ROWS = 5


def pages(spec: Spec = SPEC) -> Pages:
    format = page_format(spec)
    rng = np.random.default_rng(0)
    return make_cache(rng, format, holding="joint", num_layers=1, num_blocks=3).pages


def rows(heads: int = 2, dim: int = 64, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(ROWS, heads, dim, dtype=dtype)


def call(**changes: Any) -> dict[str, Any]:
    table = torch.zeros(9, 64, dtype=torch.bfloat16)
    values: dict[str, Any] = {
        "key": rows(),
        "value": rows(),
        "slots": torch.arange(ROWS),
        "query": rows(4),
        "rotation": Rotation(torch.arange(ROWS), table, True),
    }
    return values | changes


def rotation(**changes: Any) -> Rotation:
    usual: Rotation = call()["rotation"]
    return replace(usual, **changes)


WEIGHT = torch.ones(64, dtype=torch.bfloat16)
WRONG: dict[str, tuple[str, dict[str, Any]]] = {
    "key of other heads": ("key", {"key": rows(3)}),
    "key of other type": ("value", {"value": rows(dtype=torch.float16)}),
    "float32": ("dtype", {"key": rows(dtype=torch.float32), "value": rows(dtype=torch.float32),
                          "query": None, "rotation": None}),
    "value of other channels": ("value", {"value": rows(dim=32)}),
    "scattered heads": ("key", {"key": torch.zeros(ROWS, 64, 2, dtype=torch.bfloat16).mT}),
    "more slots than rows": ("slots", {"slots": torch.arange(ROWS + 1)}),
    "float slots": ("slots", {"slots": torch.zeros(ROWS)}),
    "strided slots": ("slots", {"slots": torch.arange(2 * ROWS)[::2]}),
    "query alone": ("query", {"rotation": None}),
    "norm alone": ("norm", {"rotation": None, "query": None, "norm": Norm(WEIGHT, WEIGHT, 1e-6)}),
    "positions": ("rotation.positions", {"rotation": rotation(positions=torch.arange(3))}),
    "table": ("rotation.cos_sin", {"rotation": rotation(cos_sin=torch.zeros(9, 64))}),
    "odd rotation": (
        "rotary_dim", {"rotation": rotation(cos_sin=torch.zeros(9, 9, dtype=torch.bfloat16))}
    ),
    "long rotation": (
        "rotary_dim", {"rotation": rotation(cos_sin=torch.zeros(9, 66, dtype=torch.bfloat16))}
    ),
    "weight": ("norm.key_weight", {"norm": Norm(WEIGHT, WEIGHT[:32], 1e-6)}),
    "query_out of other heads": ("query_out", {"query_out": rows(3)}),
    "query_out without scale": (
        "scales.query", {"query_out": rows(4).to(torch.float8_e4m3fn)}
    ),
    "query_out without query": ("query", {"query": None, "query_out": rows(4)}),
    "another device": ("device", {"slots": torch.zeros(ROWS, dtype=torch.int64, device="meta")}),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_tensor_is_named(name: str) -> None:
    field, changes = WRONG[name]
    arguments = call(**changes)
    key, value, slots = (arguments.pop(name) for name in ("key", "value", "slots"))
    for writer in (prepare(pages()), TritonWriter(pages(), 0)):
        with pytest.raises(WriteError) as caught:
            writer(key, value, slots, **arguments)
        assert caught.value.field == field, str(caught.value)
        assert caught.value.got and caught.value.expected


def test_every_kind_of_call_is_checked() -> None:
    """A call like an earlier one skips the checks; one that differs in a stride does not."""
    writer = prepare(pages())
    arguments = call()
    key, value, slots = (arguments.pop(name) for name in ("key", "value", "slots"))
    writer(key, value, slots, **arguments)
    scattered = torch.zeros(ROWS, 64, 2, dtype=torch.bfloat16).mT
    assert scattered.shape == key.shape
    with pytest.raises(WriteError):
        writer(scattered, value, slots, **arguments)


def test_pages_of_8_bit_floats_need_scales() -> None:
    writer = prepare(pages(replace(SPEC, dtype="float8_e4m3fn")))
    one = torch.ones(1)
    for scales in (None, Scales(one.double(), one), Scales(one, torch.ones(2))):
        with pytest.raises(WriteError) as caught:
            writer(rows(), rows(), torch.arange(ROWS), scales=scales)
        assert caught.value.field.startswith("scales.")


def test_pages_of_another_type_are_not_cast() -> None:
    writer = prepare(pages(replace(SPEC, dtype="float16")))
    with pytest.raises(WriteError) as caught:
        writer(rows(), rows(), torch.arange(ROWS))
    assert (caught.value.field, caught.value.got) == ("format", "float16")


def test_rows_that_vectors_miss() -> None:
    """The kernel is compiled for aligned rows; the reference takes any."""
    shifted = torch.zeros(ROWS * 2 * 64 + 1, dtype=torch.bfloat16)[1:].view(ROWS, 2, 64)
    prepare(pages())(shifted, rows(), torch.arange(ROWS))
    with pytest.raises(WriteError) as caught:
        TritonWriter(pages(), 0)(shifted, rows(), torch.arange(ROWS))
    assert (caught.value.code, caught.value.field) == ("unaligned", "key")


def test_a_slot_behind_the_last_block() -> None:
    """Where the host can see slots; on a GPU nobody can without waiting."""
    slots = torch.full((ROWS,), 3 * 16)
    with pytest.raises(WriteError) as caught:
        prepare(pages())(rows(), rows(), slots)
    assert caught.value.code == "slot-range"


def test_formats_that_hold_other_things() -> None:
    standard = page_format(Spec("standard", "HNC", 1, 16, 64, "bfloat16"))
    fields = ("dtype", "heads", "tokens", "channels", "plane", "base_bytes", "head_stride_bytes",
              "token_tile", "token_tile_stride_bytes", "token_stride_bytes", "channel_tile",
              "channel_tile_stride_bytes", "channel_stride_bytes")  # fmt: skip
    parts = [
        Component(name, **{field: getattr(component, field) for field in fields})
        for name, component in zip(("k", "w"), standard.components, strict=True)
    ]
    other = PageFormat.from_components("other", parts, standard.plane_bytes)
    with pytest.raises(WriteError) as caught:
        key_and_value(other)
    assert caught.value.code == "unknown-components"


@pytest.mark.parametrize("layer", [-1, 1])
def test_no_such_layer(layer: int) -> None:
    with pytest.raises(WriteError, match="layer"):
        prepare(pages(), layer)


def test_heads_that_are_cut_or_uneven() -> None:
    """An address and two strides must say where every head begins."""
    format = page_format(Spec("standard", "HNC", 2, 16, 64, "bfloat16"))
    memory = torch.zeros(4, format.page_bytes, dtype=torch.uint8)
    quarter, half = format.page_bytes // 4, format.page_bytes // 2
    cut = Pages(format, ((memory[:, :quarter], memory[:, quarter:]),))
    with pytest.raises(WriteError) as caught:
        TritonWriter(cut, 0)
    assert caught.value.code == "cut-head"
    other = torch.zeros(4, half + 64, dtype=torch.uint8)[:, :half]
    with pytest.raises(WriteError) as caught:
        TritonWriter(Pages(format, ((memory[:, :half], other),)), 0)
    assert caught.value.code in ("uneven-heads", "unaligned")


def test_plans_are_told_apart() -> None:
    """The compiler keys its caches by them."""
    format, tuning = page_format(SPEC), WriteTuning(1, 2, 1)
    works = [
        Work(0, "bfloat16"),
        Work(4, "bfloat16", 64),
        Work(4, "bfloat16", 64, is_neox=False),
        Work(4, "bfloat16", 32),
        Work(4, "bfloat16", 64, has_norm=True),
        Work(4, "bfloat16", 64, is_in_place=True),
    ]
    plans = {plan_write(format, work, tuning) for work in works}
    assert len(plans) == len(works) and len({hash(plan) for plan in plans}) == len(works)
    assert plan_write(format, works[0], tuning) in plans
