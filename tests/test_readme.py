"""What the README shows runs, and what it names exists."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_python_example_runs() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README, re.S)
    assert len(example.strip().splitlines()) <= 11
    done = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True)
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    # Written out by hand from the two shapes: element (7, 5, 9) of K, two bytes each.
    assert lines[0] == "(0, 59922) -> (0, 29010)"
    assert lines[1].startswith("refuse") and lines[3] == "convert"
    assert lines[4] == "Run(local=7, remote=3, num_pages=3)"


def test_every_reason_code_is_in_the_readme() -> None:
    table = (ROOT / "crates/kvpd/src/reason.rs").read_text()
    codes = re.findall(r'^    [A-Z]\w+ "([a-z-]+)" "\w+"$', table, re.M)
    assert len(codes) > 20
    assert [code for code in codes if f"`{code}`" not in README] == []


def test_links_lead_somewhere() -> None:
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
