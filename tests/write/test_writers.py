"""Every writer on every case: the reference, and the kernel in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest

from kvpd.convert import Pages
from kvpd.write import Writer, WriteTuning
from kvpd.write.reference import ReferenceWriter
from tests.write.cases import Case, check, default_matrix
from tests.write.interpreter import TritonWriter, rounding

CASES = list(default_matrix())


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
