"""Conversion of pages between formats: ``prepare`` once per cache, then call with block ids.

    source = target.seen_as(remote_format)          # in place: raw remote pages in local blocks
    conversion = prepare(source, target)
    conversion(block_ids, block_ids)

Needs torch; Triton too for pages on a GPU.
"""

from __future__ import annotations

from kvpd.errors import MissingDependencyError

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    raise MissingDependencyError(
        "kvpd.convert needs torch: pip install 'kvpd[convert]'",
        code="missing-dependency",
        field="torch",
        got="not installed",
        expected="kvpd[convert]",
    ) from error

from kvpd.convert.conversion import Conversion
from kvpd.convert.pages import Pages
from kvpd.convert.plan import DIRECT, Tuning
from kvpd.convert.registry import (
    convert_pages,
    prepare,
    register_converter,
    registered_pairs,
)
from kvpd.convert.stream import Completion, ConversionQueue

__all__ = [
    "DIRECT",
    "Completion",
    "Conversion",
    "ConversionQueue",
    "Pages",
    "Tuning",
    "convert_pages",
    "prepare",
    "register_converter",
    "registered_pairs",
]
