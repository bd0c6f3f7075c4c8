"""Writes tests/vectors/formats.json, which the Rust tests and the Python tests read.

python -m tests.oracle.make_vectors
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from tests.oracle.pages import Spec, digest, offsets

VECTORS = Path(__file__).parents[1] / "vectors" / "formats.json"

VARIANTS = (
    ("standard", "HNC"),
    ("standard", "NHC"),
    ("split-kv", "HNC"),
    ("split-kv", "NHC"),
    ("aiter-shuffle", "tiled"),
    ("aiter-shuffle", "transposed"),
)
SHAPES = (
    (2, 16, 16, "bfloat16"),
    (8, 16, 128, "bfloat16"),
    (1, 16, 64, "float16"),
    (3, 32, 64, "float16"),
    (5, 16, 128, "float8_e4m3fn"),
    (2, 32, 64, "float8_e4m3fnuz"),
    (2, 16, 16, "float32"),
)


def vector(spec: Spec, points: np.random.Generator) -> dict[str, object]:
    """One format with its ends, corners and a few elements in between."""
    found = offsets(spec)
    last = (spec.heads - 1, spec.tokens - 1, spec.head_dim - 1)
    chosen: list[tuple[int, ...]] = [(0, 0, 0), last, (spec.heads - 1, 5, 9)]
    chosen += [tuple(int(points.integers(0, end + 1)) for end in last) for _ in range(5)]
    return {
        "family": spec.family,
        "variant": spec.variant,
        "heads": spec.heads,
        "tokens": spec.tokens,
        "head_dim": spec.head_dim,
        "dtype": spec.dtype,
        "digest": digest(spec),
        "elements": [
            {"component": name, "at": at, "plane": plane, "offset_bytes": int(offset[at])}
            for name, (plane, offset) in found.items()
            for at in chosen
        ],
    }


def main() -> None:
    points = np.random.default_rng(20)
    vectors = [
        vector(Spec(family, variant, *shape), points)
        for shape in SHAPES
        for family, variant in VARIANTS
    ]
    VECTORS.write_text(json.dumps(vectors, indent=1) + "\n")


if __name__ == "__main__":
    main()
