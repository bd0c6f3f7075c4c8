"""`import kvpd` stays light, and the package says one version everywhere."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import kvpd

HEAVY = ("torch", "triton", "nixl", "nixl_cu12", "nixl_cu13", "vllm", "rich", "msgspec")


def test_importing_kvpd_loads_nothing_heavy() -> None:
    program = f"import sys, kvpd; print([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def test_the_wire_needs_no_torch() -> None:
    program = "import sys, kvpd.wire; print('torch' in sys.modules, 'nixl' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == ("False False", "")


def test_one_version_taken_from_cargo() -> None:
    cargo = tomllib.loads((Path(__file__).parents[1] / "Cargo.toml").read_text())
    assert cargo["workspace"]["package"]["version"] == kvpd.__version__ == version("kvpd")
