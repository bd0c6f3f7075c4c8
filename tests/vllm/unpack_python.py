"""Take a release's Python, without its compiled modules, out of a downloaded wheel.

``python -m tests.vllm.unpack_python WHEELS TARGET``. The wheel need not fit this platform.
"""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path


def main(wheels: str, target: str) -> int:
    """0 if there was exactly one wheel, with vLLM in it."""
    found = sorted(Path(wheels).glob("vllm*.whl"))
    if len(found) != 1:
        print(f"{len(found)} wheels of vLLM in {wheels}, expected one", file=sys.stderr)
        return 1
    with zipfile.ZipFile(found[0]) as archive:
        for name in archive.namelist():
            if name.startswith("vllm/") and not name.endswith(".so"):
                archive.extract(name, target)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
