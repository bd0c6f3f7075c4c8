"""Default kernels that spill on NVIDIA GPUs of compute capability 9.0: which, and how much.

Nearly all are programs of one warp, which pages of one head get in place. More warps would end it
and cost other pages of that length more: docs/performance.md says what was measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import torch

from tests.convert.cases import Case, default_matrix, full_matrix, pair

# By release of triton and by kernel: bytes of a thread's stack, at most (holdings and id types
# differ). float32 heads of 64 KiB are tiles that a program holds whole; the kernel of H8 N32 D256
# looks up the addresses of a page that is cut by heads.
SPILLED_BYTES = {
    "3.6.0": {
        "aiter-shuffle.tiled-standard.HNC-H1N32D64-bfloat16-in-place": 8,
        "aiter-shuffle.transposed-standard.HNC-H1N32D64-bfloat16-in-place": 16,
        "standard.HNC-aiter-shuffle.tiled-H1N32D128-bfloat16-in-place": 24,
        "standard.HNC-aiter-shuffle.tiled-H1N32D256-float8_e4m3fn-in-place": 48,
        "standard.HNC-aiter-shuffle.transposed-H1N32D256-float8_e4m3fn-in-place": 72,
        "aiter-shuffle.tiled-standard.HNC-H8N32D256-float8_e4m3fn-in-place": 8,
        "standard.HNC-aiter-shuffle.tiled-H16N32D256-float32-staged": 8,
    },
    "3.7.1": {
        "aiter-shuffle.transposed-standard.HNC-H1N16D128-bfloat16-in-place": 16,
        "aiter-shuffle.tiled-standard.HNC-H1N32D64-bfloat16-in-place": 8,
        "aiter-shuffle.transposed-standard.HNC-H1N32D64-bfloat16-in-place": 16,
        "standard.HNC-aiter-shuffle.tiled-H1N32D256-float8_e4m3fn-in-place": 64,
        "standard.HNC-aiter-shuffle.transposed-H1N32D256-float8_e4m3fn-in-place": 128,
        "standard.HNC-aiter-shuffle.tiled-H3N32D128-float8_e4m3fn-in-place": 8,
        "aiter-shuffle.tiled-standard.HNC-H8N32D256-float8_e4m3fn-in-place": 8,
        "standard.HNC-aiter-shuffle.tiled-H16N32D256-float32-staged": 8,
    },
}


def kernel_name(case: Case) -> str:
    """A case without its holding, gap and id type."""
    return str(case).rsplit("-", 2)[0]


def known_spill_bytes(case: Case, triton_version: str) -> int:
    """What the kernel of this case may spill; 0 for nearly all."""
    return SPILLED_BYTES.get(triton_version, {}).get(kernel_name(case), 0)


def long_pages() -> Iterator[Case]:
    """256 KiB to 1 MiB, in place by programs that meet and out of place, both directions."""
    for heads, dtype in ((8, "bfloat16"), (16, "bfloat16"), (16, "float32"), (10, "bfloat16")):
        for reverse in (False, True):
            for in_place in (False, True):
                specs = pair(heads, 32, 256, dtype, "tiled", reverse=reverse)
                yield Case(*specs, in_place, "joint", 48, torch.int32, num_blocks=40)


def every_case() -> Iterator[Case]:
    """All whose kernels are looked at."""
    return chain(full_matrix(), default_matrix(), long_pages())
