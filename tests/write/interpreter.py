"""Triton's interpreter for the write kernel, with casts that round as GPUs do.

The interpreter's own casts to bfloat16 truncate, and those to 8-bit floats lose the carry: torch's
take their place while a test of this folder runs a kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from tests.convert.interpreter import interpreting

with interpreting():
    import triton.language as tl
    from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder, TensorHandle

    from kvpd.write import kernels, launch

if not isinstance(kernels.write_kernel, InterpretedFunction):
    raise RuntimeError("kvpd.write.kernels was imported before the interpreter was chosen")

TritonWriter = launch.TritonWriter

_TORCH: dict[Any, tuple[torch.dtype, Any]] = {
    tl.float32: (torch.float32, np.float32),
    tl.float16: (torch.float16, np.float16),
    tl.bfloat16: (torch.bfloat16, np.uint16),
    tl.float8e4nv: (torch.float8_e4m3fn, np.uint8),
    tl.float8e4b8: (torch.float8_e4m3fnuz, np.uint8),
}
_BITS: dict[int, Any] = {1: np.uint8, 2: np.int16, 4: np.float32}


@contextmanager
def rounding() -> Iterator[None]:
    """Casts between floats go through torch."""
    own = InterpreterBuilder.cast_impl

    def cast(builder: Any, source: Any, target: Any) -> Any:
        kinds = source.dtype.scalar, target.scalar
        if not all(kind in _TORCH for kind in kinds):
            return own(builder, source, target)
        (kind_in, _), (kind_out, numpy_out) = (_TORCH[kind] for kind in kinds)
        bits = np.ascontiguousarray(source.data).view(_BITS[kind_in.itemsize])
        numbers = torch.from_numpy(bits).view(kind_in)
        if kind_out.itemsize == 1:
            # Not every GPU saturates, and torch does: a kernel must not rely on it.
            beyond = numbers.float().abs() > torch.finfo(kind_out).max
            numbers = numbers.masked_fill(beyond, torch.nan)
        numbers = numbers.to(kind_out)
        integers = numbers.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[kind_out.itemsize])
        return TensorHandle(integers.numpy().view(numpy_out), kinds[1])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "cast_impl", cast)
        patch.setattr(
            InterpreterBuilder,
            "create_fp_to_fp",
            lambda builder, source, target, mode: cast(builder, source, target),
        )
        yield


__all__ = ["TritonWriter", "kernels", "launch", "rounding"]
