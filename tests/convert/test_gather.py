"""Equal formats out of place: a plain gather, held alike or not, by all implementations.

The standard and split formats have an interior of their own here, so that a conversion which
permutes by mistake, or takes the K plane for the V plane, cannot come out right.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from kvpd.convert import DIRECT, Conversion, Pages, prepare
from kvpd.convert.host import HostConversion
from kvpd.convert.reference import ReferenceConversion
from tests.convert.caches import Holding, make_cache, page_format
from tests.convert.interpreter import TritonConversion
from tests.oracle.pages import Spec

Build = Callable[[Pages, Pages], Conversion]

BUILDS: dict[str, Build] = {
    "host": HostConversion,
    "reference": ReferenceConversion,
    "kernel": TritonConversion,
    "kernel-direct": lambda source, target: TritonConversion(source, target, DIRECT),
}


@dataclass(frozen=True)
class Gather:
    """One format, and how each side holds it."""

    spec: Spec
    source: Holding
    target: Holding

    def __str__(self) -> str:
        spec = self.spec
        extents = f"H{spec.heads}N{spec.tokens}D{spec.head_dim}-{spec.dtype}"
        return f"{spec.family}.{spec.variant}-{extents}-{self.source}-{self.target}"


GATHERS = [
    Gather(Spec("standard", "HNC", 4, 16, 64, "bfloat16"), "joint", "joint"),
    Gather(Spec("standard", "HNC", 4, 16, 64, "float8_e4m3fn"), "heads", "interleaved"),
    Gather(Spec("standard", "NHC", 3, 16, 80, "float16"), "joint", "interleaved"),
    Gather(Spec("split-kv", "HNC", 2, 32, 64, "bfloat16"), "planes", "joint"),
    Gather(Spec("aiter-shuffle", "tiled", 5, 16, 128, "bfloat16"), "planes", "planes"),
    Gather(Spec("aiter-shuffle", "transposed", 4, 32, 64, "float32"), "joint", "planes"),
    Gather(Spec("aiter-shuffle", "tiled", 8, 32, 256, "bfloat16"), "planes", "planes"),
]


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("gather", GATHERS, ids=str)
def test_pages_move_as_they_are(gather: Gather, build: str) -> None:
    """Random bytes in, the same bytes out, in the asked blocks and nowhere else."""
    rng = np.random.default_rng(11)
    page = page_format(gather.spec)
    shared: dict[str, Any] = {"num_layers": 2, "gap_bytes": 48}
    source = make_cache(rng, page, holding=gather.source, num_blocks=6, **shared)
    target = make_cache(rng, page, holding=gather.target, num_blocks=5, **shared)
    blocks_in, blocks_out = [5, 0, 3], [1, 4, 0]
    conversion = BUILDS[build](source.pages, target.pages)
    assert not conversion.in_place
    for layer in range(2):
        for a, b in zip(blocks_in, blocks_out, strict=True):
            pieces = [
                source.image[place.offset + a * place.stride :][: place.num_bytes]
                for place in source.places[layer]
            ]
            target.write(layer, b, np.concatenate(pieces))
    conversion(torch.tensor([*blocks_in, -1]), torch.tensor([*blocks_out, 2]))
    assert target.differing().size == 0
    assert source.differing().size == 0


def test_prepare_passes_the_tuning_on() -> None:
    rng = np.random.default_rng(3)
    page = page_format(GATHERS[0].spec)
    source, target = (
        make_cache(rng, page, holding="joint", num_layers=1, num_blocks=2) for _ in range(2)
    )
    conversion = prepare(source.pages, target.pages, implementation="triton", tuning=DIRECT)
    assert isinstance(conversion, TritonConversion)
    assert conversion.tuning is DIRECT
    # Resident programs share the work: the grid must not grow with the request.
    assert conversion.constants["RESIDENT"]
    default = prepare(source.pages, target.pages, implementation="triton")
    assert isinstance(default, TritonConversion)
    assert default.tuning is not DIRECT
