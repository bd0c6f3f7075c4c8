"""Every writer on every case: the reference, and the kernel in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvpd import PageFormat
from kvpd.convert import Pages
from kvpd.write import Norm, Rotation, Writer, WriteTuning
from kvpd.write.reference import ReferenceWriter, rms_norm
from tests.write import oracle
from tests.write.cases import EPSILON, Case, check, default_matrix
from tests.write.interpreter import TritonWriter, rounding

CASES = list(default_matrix())


def test_the_norm_adds_in_the_order_of_vllms_kernel() -> None:
    """On rows that come out otherwise in another order: a few of many."""
    generator = torch.Generator().manual_seed(3)
    many = torch.randn(30000, 1, 64, generator=generator).to(torch.bfloat16)
    weight = torch.randn(64, generator=generator).to(torch.bfloat16)
    numbers = many.float()
    other = numbers * torch.rsqrt(numbers.pow(2).sum(-1, keepdim=True) / 64 + EPSILON)
    differs = (other * weight.float()).to(torch.bfloat16) != rms_norm(many, weight, EPSILON)
    rows = many[differs.flatten(1).any(-1)][:8].contiguous()
    assert len(rows) == 8
    expected = oracle.rms_norm(rows, weight, EPSILON)
    format = PageFormat.split_kv(heads=1, tokens=16, head_dim=64, dtype="bfloat16")
    pages = Pages(format, ((torch.zeros(1, format.page_bytes, dtype=torch.uint8),),))
    # Angles of zero: what comes out is the norm's.
    table = torch.cat((torch.ones(1, 32), torch.zeros(1, 32)), dim=-1).to(torch.bfloat16)
    positions = torch.zeros(8, dtype=torch.int64)
    for writer in (ReferenceWriter(pages, 0), TritonWriter(pages, 0)):
        out = torch.zeros_like(rows)
        with rounding():
            writer(
                rows,
                rows,
                torch.arange(8),
                rotation=Rotation(positions, table, True),
                norm=Norm(weight, weight, EPSILON),
                key_out=out,
            )
        assert torch.equal(out, expected)


def reference(pages: Pages, layer: int, tuning: WriteTuning | None) -> Writer:
    return ReferenceWriter(pages, layer)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_reference(case: Case) -> None:
    check(case, reference)


# The interpreter does not know MI300's 8-bit float; test_compiled compiles it for that GPU.
@pytest.mark.parametrize("case", [c for c in CASES if "fnuz" not in str(c)], ids=str)
def test_kernel(case: Case) -> None:
    prepare: Any = TritonWriter
    with rounding():
        check(case, prepare)
