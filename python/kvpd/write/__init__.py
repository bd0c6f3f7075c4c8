"""Writers: a batch's K and V into their pages, with RoPE and QK norm on the way.

    write = prepare(pages, layer=0)
    write(key, value, slots)
    write(key, value, slots, query=query, rotation=Rotation(positions, cos_sin, is_neox=True))

One kernel, made from the page format. Needs torch; Triton too for pages on a GPU.
"""

from __future__ import annotations

from kvpd.errors import MissingDependencyError

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    raise MissingDependencyError(
        "kvpd.write needs torch: pip install 'kvpd[convert]'",
        code="missing-dependency",
        field="torch",
        got="not installed",
        expected="kvpd[convert]",
    ) from error

from kvpd.write.plan import WriteTuning
from kvpd.write.prepare import prepare
from kvpd.write.writer import Norm, Rotation, Scales, Writer

__all__ = ["Norm", "Rotation", "Scales", "WriteTuning", "Writer", "prepare"]
