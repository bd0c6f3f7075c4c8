"""A few conversions of every kind, for a checker to watch: ``python -m tests.gpu``."""

from __future__ import annotations

import torch

from kvpd.convert.launch import TritonConversion
from tests.convert.cases import Case, check, pair


def main() -> None:
    """In place whole and in parts that meet, out of place, both element sizes and directions."""
    for heads, tokens, head_dim, dtype in (
        (8, 16, 128, "bfloat16"),
        (3, 16, 64, "float8_e4m3fn"),
        (16, 32, 256, "bfloat16"),
    ):
        for reverse in (False, True):
            for in_place in (False, True):
                specs = pair(heads, tokens, head_dim, dtype, "tiled", reverse=reverse)
                case = Case(*specs, in_place, "joint", 48, torch.int32, num_layers=1)
                check(case, TritonConversion, device="cuda")


if __name__ == "__main__":
    main()
