"""What the compilers make of the write kernel, for GPUs that are not here."""

from __future__ import annotations

from collections import Counter
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from kvpd import write
from tests.convert.test_compiled import OTHER_TRITON, SHARED_LIMIT_BYTES
from tests.convert.test_compiled import probe as convert_probe

KERNELS = Path(write.__file__).with_name("kernels.py")
# Each format, job and cut once; `python -m tests.write.compile_probe` compiles all of them. Not
# the cut for few tokens: its programs have fewer vectors than threads, which share them.
CHECKED = "shuffled-rope-some,shuffled-norm-many,shuffled-fp8-write-many,packed-rope-many"


probe = partial(convert_probe, module="tests.write.compile_probe")


@cache
def compiled(other: bool) -> dict[str, Any]:
    return probe(other=other, only=CHECKED)


def complaints(fact: dict[str, Any]) -> list[str]:
    """Everything about one compiled kernel that must not be."""
    name, kinds = fact["name"], Counter(fact["sequence"])
    found = []
    chip = name.rsplit("-", 1)[1]
    if fact["spills"]:
        found.append(f"{fact['spills']} vector registers or bytes spilled")
    if fact["shared"] > SHARED_LIMIT_BYTES[chip]:
        found.append(f"{fact['shared']} bytes of shared memory")
    if not kinds["load16"] or not kinds["store16"]:
        found.append(f"not 16 bytes wide: {dict(kinds)}")
    if kinds["load16"] < fact["wide_loads"]:
        found.append(f"{kinds['load16']} wide loads, {fact['wide_loads']} expected")
    if kinds["store16"] < fact["wide_stores"]:
        found.append(f"{kinds['store16']} wide stores, {fact['wide_stores']} expected")
    # One for Q and one for K. Elsewhere other barriers are among them: exchanges between threads.
    if fact["in_place"] and name.startswith("packed") and kinds["barrier"] < 2:
        found.append("no barrier between reading and writing in place")
    return found


@pytest.mark.parametrize("other", [False, True], ids=["installed", "3.6.0"])
def test_every_kernel(other: bool) -> None:
    if other and not OTHER_TRITON.is_dir():
        pytest.skip(
            f"NOT CHECKED WITH TRITON 3.6.0: no {OTHER_TRITON}, make target/triton-3.6.0 gets it"
        )
    result = compiled(other)
    assert len(result["facts"]) == 3 * len(CHECKED.split(","))
    assert (result["triton"] == "3.6.0") == other
    bad = {fact["name"]: complaints(fact) for fact in result["facts"] if complaints(fact)}
    assert not bad


MUTANTS = {
    "no hint for pages": (
        "tl.max_contiguous(tl.multiple_of(pointers, (1, 1, VECTOR_BYTES)), (1, 1, V))",
        "pointers",
        "wide stores",
        "shuffled-rope-some-sm_90",
    ),
    "no hint for rows": (
        "tl.max_contiguous(tl.multiple_of(pointers, (1, 1, B)), (1, 1, 8))",
        "pointers",
        "wide loads",
        "shuffled-rope-some-sm_90",
    ),
    "no barrier": (
        "        read_before_write(HIP)\n",
        "        pass\n",
        "no barrier",
        "packed-rope-many-sm_90",
    ),
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
