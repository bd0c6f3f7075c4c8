"""Who converts a pair of formats."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kvpd import ConversionError, PageFormat
from kvpd.convert import Conversion, Pages, convert_pages, prepare, register_converter, registry
from kvpd.convert.host import HostConversion
from kvpd.convert.reference import ReferenceConversion

SHAPE: dict[str, Any] = {"heads": 2, "tokens": 16, "head_dim": 64, "dtype": "bfloat16"}
STANDARD = PageFormat.standard(**SHAPE)
SHUFFLED = PageFormat.aiter_shuffle(**SHAPE)


@pytest.fixture(autouse=True)
def _no_leftovers() -> Iterator[None]:
    before = dict(registry._converters)
    yield
    registry._converters.clear()
    registry._converters.update(before)


class Quantising(Conversion):
    """Some backend's own converter; it need not be a permutation."""

    def _run(self, source_ids: torch.Tensor, target_ids: torch.Tensor) -> None:
        for (piece,) in self.target.layers:
            piece[target_ids.long()] = 42


def pages(format: PageFormat) -> Pages:
    return Pages(format, ((torch.zeros((2, format.page_bytes), dtype=torch.uint8),),))


def test_registered_converter_comes_first() -> None:
    register_converter(STANDARD, SHUFFLED, Quantising)
    source, target = pages(STANDARD), pages(SHUFFLED)
    ids = torch.tensor([1])
    convert_pages(source, target, ids, ids)
    assert (target.layers[0][0] == torch.tensor([[0], [42]])).all()
    assert isinstance(prepare(source, target, implementation="reference"), ReferenceConversion)
    assert isinstance(prepare(pages(SHUFFLED), pages(STANDARD)), HostConversion)


def test_registry_goes_by_what_formats_are_not_by_name() -> None:
    same = PageFormat.from_components(
        "another name", SHUFFLED.components, SHUFFLED.plane_bytes, SHUFFLED.padding
    )
    register_converter(STANDARD, same, Quantising)
    assert isinstance(prepare(pages(STANDARD), pages(SHUFFLED)), Quantising)


def test_second_registration_is_refused() -> None:
    register_converter(STANDARD, SHUFFLED, Quantising)
    register_converter(SHUFFLED, STANDARD, Quantising)
    with pytest.raises(ConversionError) as caught:
        register_converter(STANDARD, SHUFFLED, ReferenceConversion)
    assert caught.value.code == "duplicate-converter"
    assert caught.value.got == "ReferenceConversion"


def test_unknown_implementation() -> None:
    unknown: Any = "fast"
    with pytest.raises(ConversionError) as caught:
        prepare(pages(STANDARD), pages(SHUFFLED), implementation=unknown)
    assert caught.value.code == "implementation"


def test_host_conversions_do_not_import_triton() -> None:
    code = (
        "import sys, torch, kvpd.convert as c, kvpd;"
        "f = kvpd.PageFormat.standard(heads=1, tokens=16, head_dim=16, dtype='float16');"
        "p = c.Pages(f, ((torch.zeros((1, f.page_bytes), dtype=torch.uint8),),));"
        "q = c.Pages(f, ((torch.zeros((1, f.page_bytes), dtype=torch.uint8),),));"
        "i = torch.tensor([0]); c.convert_pages(p, q, i, i);"
        "sys.exit(any(name.split('.')[0] in ('nixl', 'vllm') or name == 'kvpd.convert.kernels'"
        " for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
