"""Tests of the tests: kernels with a known fault must fail the checks that the real ones pass."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kvpd import convert
from kvpd.convert import Pages
from kvpd.convert.plan import Tuning
from tests.convert.cases import Case, check, pair
from tests.convert.interpreter import TritonConversion, interpreting, launch

KERNELS = Path(convert.__file__).with_name("kernels.py")
IN_PLACE = Case(
    *pair(4, 16, 64, "bfloat16", "tiled", reverse=False), True, "planes", 32, torch.int32
)
STAGED = Case(*pair(3, 16, 64, "bfloat16", "tiled", reverse=True), False, "heads", 32, torch.int64)


def unordered(source: Pages, target: Pages) -> TritonConversion:
    """In place by programs of one head each, none of which waits for another."""
    conversion = TritonConversion(source, target, Tuning(4096, 4096))
    assert conversion.plan.num_tiles == 4
    conversion.constants |= {"IN_PLACE": False, "PARTS": 4, "PART_TILES": 1}
    conversion._work_per_id = source.num_layers * conversion.plan.num_tiles
    return conversion


def test_programs_of_one_head_in_place() -> None:
    check(IN_PLACE, lambda a, b: TritonConversion(a, b, Tuning(4096, 4096)))
    with pytest.raises(AssertionError, match="bytes of the target differ"):
        check(IN_PLACE, unordered)


FAULTS = {
    "padding of one side is not skipped": (
        STAGED,
        "(source_page >= 0) & (target_page >= 0)",
        "(target_page >= 0)",
    ),
    "block stride of the first piece everywhere": (
        STAGED,
        "base += page * tl.load(entry + 1, mask=inside, other=0)",
        "base += page * PIECE_BYTES",
    ),
    "second piece taken for the first": (IN_PLACE, "second - PIECE_BYTES)", "first)"),
    "no permutation": (IN_PLACE, "if len(P) > 0:", "if len(P) > 99:"),
    "tiles all start at the first": (STAGED, "START + tile * STEP", "START"),
    "first layer only": (IN_PLACE, "layer = page // num_ids", "layer = page // num_ids * 0"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faulty_kernels_are_caught(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, old, new = FAULTS[name]
    tuning = Tuning(4096, 4096)

    def prepare(source: Pages, target: Pages) -> TritonConversion:
        return TritonConversion(source, target, tuning)

    check(case, prepare)
    text = KERNELS.read_text()
    assert old in text
    path = tmp_path / "kernels.py"
    path.write_text(text.replace(old, new))
    monkeypatch.setattr(launch, "convert_kernel", mutant(path))
    with pytest.raises(AssertionError, match="differ"):
        check(case, prepare)


def mutant(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"mutant_{path.parent.name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    with interpreting():
        spec.loader.exec_module(module)
    return module.convert_kernel
