"""The Python of each vLLM release that kvpd serves, and what a scan in it finds.

0.32.0 is installed; the others are unpacked by `make target/vllm-RELEASE`. They are read and asked;
their compiled modules are not needed.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
from pathlib import Path
from typing import Any

from tests.vllm.client import ROOT, vllm_python

RELEASES = ("0.30.0", "0.31.0", "0.32.0", "0.33.0")
INSTALLED = "0.32.0"


def missing(release: str) -> str:
    """What to do about a release that is not there; empty if it is."""
    place = _place(release)
    if place is None or (place / "vllm").is_dir():
        return ""
    return f"no vLLM {release} in {place}: make target/vllm-{release}"


@functools.cache
def scanned(release: str) -> tuple[dict[str, Any], ...]:
    """The findings of `tests.vllm.backend_scan` in a release's Python; run once.

    Raises:
        RuntimeError: the scan ended with an error.
    """
    place = _place(release)
    path = [str(place) if place else "", os.environ.get("PYTHONPATH", ""), str(ROOT)]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "OMP_NUM_THREADS": "1",
        # What these say is part of what a backend answers.
        "VLLM_ROCM_USE_AITER": "0",
        "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT": "0",
    }
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    done = subprocess.run(
        [vllm_python(), "-m", "tests.vllm.backend_scan"],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        cwd=ROOT,
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-4000:])
    return tuple(json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))


def _place(release: str) -> Path | None:
    return None if release == INSTALLED else ROOT / "target" / f"vllm-{release}"
