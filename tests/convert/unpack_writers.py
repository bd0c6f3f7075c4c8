"""Take the engines' cache writers out of downloaded wheels, for `test_real_writers`.

``python -m tests.convert.unpack_writers WHEELS TARGET``. The wheels need not fit this platform.
"""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

WANTED = (
    "vllm/v1/attention/backends/rocm_aiter_fa.py",
    "aiter/ops/triton/_triton_kernels/fused_kv_cache.py",
)


def main(wheels: str, target: str) -> int:
    """0 if both were found."""
    missing = set(WANTED)
    for wheel in sorted(Path(wheels).glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            for name in sorted(missing & set(archive.namelist())):
                archive.extract(name, target)
                missing.discard(name)
    for name in sorted(missing):
        print(f"no wheel in {wheels} has {name}", file=sys.stderr)
    return 1 if missing else 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
