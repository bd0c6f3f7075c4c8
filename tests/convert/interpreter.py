"""Triton's interpreter for this process's kernels, and for no child process.

`TRITON_INTERPRET` is read when triton is imported and when a kernel is decorated, so it is set only
while that happens: left in the environment it would reach every subprocess a test starts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interpreting() -> Iterator[None]:
    """Kernels imported inside run on CPU tensors."""
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before


with interpreting():
    # Imported by the first launch otherwise, outside of this block, which triton asserts against.
    import triton.experimental.gluon  # noqa: F401
    from triton.runtime.interpreter import InterpretedFunction

    from kvpd.convert import kernels, launch

if not isinstance(kernels.convert_kernel, InterpretedFunction):
    raise RuntimeError("kvpd.convert.kernels was imported before the interpreter was chosen")

TritonConversion = launch.TritonConversion

__all__ = ["TritonConversion", "interpreting", "kernels", "launch"]
