"""What the compilers make of the kernels, for GPUs that are not here.

The interpreter runs one thread after the other, and on a GPU the wrong order is rarely seen: that
every load comes before the barrier and every store after it can only be read in the machine code.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from kvpd import convert
from tests.convert.spills import SPILLED_BYTES

KERNELS = Path(convert.__file__).with_name("kernels.py")
ROOT = Path(__file__).parents[2]
# Accidental barriers differ by version; a second one is taken from here if it is there.
OTHER_TRITON = ROOT / "target" / "triton-3.6.0"
SHARED_LIMIT_BYTES = {"sm_90": 232_448, "gfx942": 65_536, "gfx950": 163_840}
# Ids and table entries of a program.
MAX_NARROW_LOADS = 10


def probe(
    *,
    other: bool = False,
    kernels: Path | None = None,
    only: str = "",
    spills: bool = False,
    module: str = "tests.convert.compile_probe",
) -> dict[str, Any]:
    """Compile in a process of its own: this one may have chosen the interpreter."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    paths = [str(OTHER_TRITON)] if other else []
    environment["PYTHONPATH"] = os.pathsep.join([*paths, str(ROOT), *sys.path[1:]])
    arguments = ["--kernels", str(kernels)] if kernels is not None else []
    arguments += ["--spills"] if spills else []
    done = subprocess.run(
        [sys.executable, "-m", module, "--only", only, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@cache
def compiled(other: bool) -> dict[str, Any]:
    """All facts of one triton, compiled once."""
    return probe(other=other)


def complaints(fact: dict[str, Any]) -> list[str]:
    """Everything about one compiled kernel that must not be."""
    sequence, name = fact["sequence"], fact["name"]
    found = []
    if fact["spills"]:
        found.append(f"{fact['spills']} bytes spilled")
    if fact["shared"] > SHARED_LIMIT_BYTES[name.rsplit("-", 1)[1]]:
        found.append(f"{fact['shared']} bytes of shared memory")
    if sequence.count("store"):
        found.append(f"{sequence.count('store')} stores are not 16 bytes wide")
    if sequence.count("load") > MAX_NARROW_LOADS:
        found.append(f"{sequence.count('load')} loads are not 16 bytes wide")
    for kind in ("load16", "store16"):
        if sequence.count(kind) < fact["vectors_per_thread"]:
            found.append(f"{sequence.count(kind)} of {fact['vectors_per_thread']} are {kind}")
    if fact["in_place"]:
        found += _order_complaints(fact)
    return found


def _order_complaints(fact: dict[str, Any]) -> list[str]:
    sequence = fact["sequence"]
    on_amd = "-gfx" in fact["name"]
    fences = [
        position
        for position, kind in enumerate(sequence)
        if kind == "barrier" and (not on_amd or sequence[position - 1] == "wait")
    ]
    first_store = sequence.index("store16") if "store16" in sequence else len(sequence)
    last_load = max((i for i, kind in enumerate(sequence) if kind == "load16"), default=-1)
    if last_load > first_store:
        return ["a page is read after it was written"]
    # Threads that exchange values pass barriers too, of which the next compiler may need none.
    after = [i for i, kind in enumerate(sequence) if kind in ("exchange", "store16")]
    next_use = min((i for i in after if i > last_load), default=len(sequence))
    if not any(last_load < fence < next_use for fence in fences):
        return ["no barrier between reading and writing a page"]
    meets = "atomic" in sequence[last_load:first_store]
    if fact["meets"] != meets:
        return [f"the parts of a page {'meet' if meets else 'do not meet'} before it is written"]
    return []


@pytest.mark.parametrize("other", [False, True], ids=["installed", "3.6.0"])
def test_every_kernel(other: bool) -> None:
    if other and not OTHER_TRITON.is_dir():
        pytest.skip(
            f"NOT CHECKED WITH TRITON 3.6.0: no {OTHER_TRITON}, make target/triton-3.6.0 gets it"
        )
    result = compiled(other)
    assert len(result["facts"]) == 72
    assert (result["triton"] == "3.6.0") == other
    bad = {fact["name"]: complaints(fact) for fact in result["facts"] if complaints(fact)}
    assert not bad


@pytest.mark.slow
@pytest.mark.parametrize("other", [False, True], ids=["installed", "3.6.0"])
def test_only_the_known_kernels_spill(other: bool) -> None:
    """All kernels of the cases that tests convert, as many as a GPU would compile."""
    if other and not OTHER_TRITON.is_dir():
        pytest.skip("NOT CHECKED WITH TRITON 3.6.0")
    result = probe(other=other, spills=True)
    assert len(result["facts"]) > 300
    found: dict[str, int] = {}
    for fact in result["facts"]:
        if fact["stack_bytes"]:
            found[fact["name"]] = max(fact["stack_bytes"], found.get(fact["name"], 0))
    assert found == SPILLED_BYTES[result["triton"]]


SMALL = "H8N16D128-bfloat16-tiled-forth-in-place"
LONG = "H16N32D256-bfloat16-tiled-forth-in-place"
MUTANTS = {
    "no barrier": ("        read_before_write(HIP)\n", "", "no barrier between", SMALL),
    "no hint": (
        "tl.max_contiguous(tl.multiple_of(pointers, (UNIT, VECTOR_BYTES)), (1, UNITS))",
        "pointers",
        "not 16 bytes wide",
        SMALL,
    ),
    "no wait on AMD": (
        r"s_waitcnt vmcnt(0)\n\ts_barrier",
        "s_barrier",
        "no barrier between",
        f"{SMALL}-gfx942",
    ),
    "no meeting": ("            meet(counter, PARTS)\n", "            pass\n", "do not meet", LONG),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_rejected(name: str, tmp_path: Path) -> None:
    old, new, complaint, only = MUTANTS[name]
    text = KERNELS.read_text()
    assert text.count(old) == 1
    path = tmp_path / "kernels.py"
    path.write_text(text.replace(old, new))
    facts = probe(kernels=path, only=only)["facts"]
    assert facts
    for fact in facts:
        assert any(complaint in found for found in complaints(fact)), (fact["name"], fact)
