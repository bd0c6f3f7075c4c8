"""What the smoke says of a decoder on a nearly full GPU, on values that are written down."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from tests.gpu.smoke_full import TIGHT

CAPTURED = "Graph capturing finished in 1 secs\n"
SMALLER, NONE = TIGHT["a smaller slab"], TIGHT["no slab"]
SMALLER_SAID = "the slab has 200 MiB, not 512 MiB\n"
NONE_SAID = "no slab, raw pages land in the cache (slower)\n"


def test_nothing_is_said_of_what_is_right() -> None:
    assert SMALLER.faults({"slab_bytes": 200 << 20}, CAPTURED + SMALLER_SAID) == []
    assert NONE.faults({"slab_bytes": 0}, CAPTURED + NONE_SAID) == []
    assert (SMALLER.arm.placement, NONE.arm.placement) == ("staged", "in_place")


@pytest.mark.parametrize(
    ("slab_mib", "log"),
    [
        (512, CAPTURED + SMALLER_SAID),
        (0, CAPTURED + SMALLER_SAID),
        (200, CAPTURED),
        (200, CAPTURED + 2 * SMALLER_SAID),
        (200, SMALLER_SAID),
    ],
)
def test_each_fault_is_one(slab_mib: int, log: str) -> None:
    assert len(SMALLER.faults({"slab_bytes": slab_mib << 20}, log)) == 1


def test_a_slab_where_there_must_be_none() -> None:
    assert len(NONE.faults({"slab_bytes": 65536}, CAPTURED + NONE_SAID)) == 1
