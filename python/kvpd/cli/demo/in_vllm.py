"""``kvpd demo --vllm``: run the demo of the vLLM test bed, which is no part of the package."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import kvpd
from kvpd.errors import MissingDependencyError

MODULE = "tests.vllm.demo"


def run_in_vllm(start: Path | None = None) -> int:
    """Run it in a process of its own.

    Args:
        start: where the package is; found by itself if None.

    Returns:
        Its exit status: 0 when kvpd's tokens and bytes are all right.

    Raises:
        MissingDependencyError: this is no checkout of the project.
    """
    package = Path(kvpd.__file__).parent if start is None else start
    places = [package.parents[1], Path.cwd()]
    for root in places:
        if root.joinpath(*MODULE.split(".")).with_suffix(".py").is_file():
            return _run(root)
    raise MissingDependencyError(
        "kvpd demo --vllm runs the test bed of a checkout (tests/vllm), which is not in the "
        "installed package: clone the project and run `make demo` there",
        code="no-checkout",
        field=MODULE,
        got="not found in " + " or ".join(str(place) for place in places),
        expected="a checkout",
    )


def _run(root: Path) -> int:
    environment = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    command = [sys.executable, "-m", MODULE]
    return subprocess.run(command, cwd=root, env=environment, check=False).returncode
