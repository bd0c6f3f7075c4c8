"""The smoke's digest, what it says of parts that ended in every way, and whether it is current."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import smoke
from tests.gpu.code_digest import CODE, ROOT, code_digest, code_files
from tests.gpu.smoke import PARTS, STAGES, Part, currency, outcome, run_stage, text

CHECKS = Part("tests/gpu/check_direct.py", 10)
ENGINES = Part("tests.gpu.smoke_pairs", 10)


def code(root: Path) -> Path:
    """Little code, as it lies in a checkout."""
    for name, content in (
        ("crates/kvpd/src/lib.rs", "fn it() {}"),
        ("crates/kvpd/Cargo.toml", "[package]"),
        ("python/kvpd/wire.py", "x = 1"),
        ("python/kvpd/_kvpd.pyi", ""),
        ("tests/test_wire.py", "y = 1"),
    ):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


def test_the_digest_is_of_what_git_tracks() -> None:
    git = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *CODE]
    listed = subprocess.run(git, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("no git checkout")
    assert code_files() == sorted(name for name in listed.stdout.split() if (ROOT / name).exists())


def test_builds_leave_the_digest_alone_and_changes_do_not(tmp_path: Path) -> None:
    root = code(tmp_path)
    first = code_digest(root)
    for name in (
        "python/kvpd/_kvpd.abi3.so",
        "python/kvpd/__pycache__/wire.cpython-312.pyc",
        "crates/kvpd/target/release/libkvpd.rlib",
        "crates/kvpd/proptest-regressions/page.txt",
        "python/kvpd.egg-info/PKG-INFO",
        "tests/gpu/smoke.py",
    ):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("built")
        assert code_digest(root) == first, name
    seen = {first}
    for change in (
        lambda: (root / "python/kvpd/wire.py").write_text("x = 2"),
        lambda: (root / "crates/kvpd/src/lib.rs").write_text("fn it() {} "),
        lambda: (root / "python/kvpd/new.py").write_text(""),
        lambda: (root / "python/kvpd/new.py").rename(root / "python/kvpd/newer.py"),
        lambda: (root / "python/kvpd/_kvpd.pyi").unlink(),
    ):
        change()
        seen.add(code_digest(root))
    assert len(seen) == 6


def test_content_does_not_slip_from_one_file_into_the_next(tmp_path: Path) -> None:
    one, two = code(tmp_path / "one"), code(tmp_path / "two")
    (one / "python/kvpd/wire.py").write_text("ab")
    (one / "python/kvpd/x.py").write_text("")
    (two / "python/kvpd/wire.py").write_text("a")
    (two / "python/kvpd/x.py").write_text("b")
    assert code_digest(one) != code_digest(two)


def result(**changes: Any) -> dict[str, Any]:
    return {
        "code": "c0de" * 16,
        "device": {"name": "NVIDIA H200"},
        "versions": {"vllm": "0.33.0"},
        "passed": True,
        "seconds": 1.0,
        "parts": {name: {"status": "passed", "why": ""} for name in PARTS},
        **changes,
    }


FAILED = {name: {"status": "passed"} for name in PARTS} | {"direct": {"status": "failed"}}
FEWER = {name: {"status": "passed"} for name in PARTS if name != "full"}


@pytest.mark.parametrize(
    ("found", "is_current", "said"),
    [
        (result(), True, "passed on this code, c0dec0dec0de (NVIDIA H200, vLLM 0.33.0)"),
        (result(code="0" * 64), False, "NOT RUN on this code, c0dec0dec0de: r.json is of 00000000"),
        (result(passed=False, parts=FAILED), False, "NOT PASSED on this code"),
        # A part that was added since.
        (result(parts=FEWER), False, "(NVIDIA H200, vLLM 0.33.0): full"),
    ],
)
def test_currency(tmp_path: Path, found: dict[str, Any], is_current: bool, said: str) -> None:
    path = tmp_path / "r.json"
    path.write_text(json.dumps(found))
    answer, line = currency(path, "c0de" * 16)
    assert answer is is_current
    assert said in line and "\n" not in line


def test_without_a_result_nothing_was_run(tmp_path: Path) -> None:
    assert currency(tmp_path / "r.json", "c0de") == (
        False,
        "GPU smoke: not run, there is no r.json",
    )


def test_the_question_is_answered_in_a_line_without_torch() -> None:
    source = (
        "import sys; from tests.gpu.smoke import main; status = main(['--is-current']);"
        "assert not {'torch', 'triton', 'vllm', 'kvpd', 'numpy'} & set(sys.modules); exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True)
    is_current, line = currency(smoke.RESULT, code_digest())
    assert (done.stdout, done.stderr) == (line + "\n", "")
    assert done.returncode == (0 if is_current else 1)


def test_all_parts_run_once_within_eight_minutes() -> None:
    assert sorted(name for stage in STAGES for name in stage) == sorted(PARTS)
    assert sum(max(PARTS[name].limit_seconds for name in stage) for stage in STAGES) <= 480


@pytest.mark.parametrize(
    "arguments", [["--gpus", "0"], ["--parts", "direct"]], ids=["on a CPU", "a part"]
)
def test_what_is_no_whole_run_does_not_replace_the_result(arguments: list[str]) -> None:
    with pytest.raises(SystemExit):
        smoke.main(arguments)


JUNIT = '<testsuites><testsuite name="pytest">{}</testsuite></testsuites>'
GOOD = '<testcase name="test_bytes"/>'
BAD = '<testcase name="test_times"><failure message="no"/></testcase>'
BROKEN = '<testcase name="test_fixture"><error message="no"/></testcase>'
SKIPPED = '<testcase name="check"><skipped message="NO GPU"/></testcase>'


@pytest.mark.parametrize(
    ("report", "exit_status", "status", "why"),
    [
        (GOOD, 0, "passed", ""),
        (GOOD + SKIPPED, 0, "passed", ""),
        (GOOD + BAD, 1, "failed", "1 of 2 checks, first test_times"),
        (BROKEN, 1, "failed", "1 of 1 checks, first test_fixture"),
        (SKIPPED, 5, "not run", "NO GPU"),
        ("", 5, "not run", "pytest found no checks"),
        # It was ended, or ended itself, after its report said nothing bad.
        (GOOD, -11, "failed", "it ended with -11"),
        (GOOD, None, "failed", "not done after 10 s"),
        (None, 4, "failed", "it left no report"),
    ],
)
def test_what_pytest_left(
    tmp_path: Path, report: str | None, exit_status: int | None, status: str, why: str
) -> None:
    (tmp_path / "part.log").write_text("said")
    if report is not None:
        (tmp_path / "part.result").write_text(JUNIT.format(report))
    found = outcome(CHECKS, exit_status, tmp_path, "part")
    assert (found["status"], found["why"]) == (status, why)
    assert found.get("output") == ("said" if status == "failed" else None)


@pytest.mark.parametrize(
    ("written", "exit_status", "status", "why"),
    [
        ({"faults": [], "is_complete": True}, 0, "passed", ""),
        ({"faults": ["2 pages are wrong", "x"], "is_complete": True}, 0, "failed", "2 pages are"),
        ({"faults": [], "is_complete": False}, 1, "failed", "it did not come to its end"),
        ({"faults": [], "is_complete": False}, None, "failed", "not done after 10 s"),
        ({"faults": [], "is_complete": True}, 1, "failed", "it ended with 1"),
        (None, 1, "failed", "it left no result"),
    ],
)
def test_what_engines_left(
    tmp_path: Path,
    written: dict[str, Any] | None,
    exit_status: int | None,
    status: str,
    why: str,
) -> None:
    (tmp_path / "part.log").write_text("said")
    if written is not None:
        (tmp_path / "part.result").write_text(json.dumps(written | {"arms": {"an arm": {}}}))
    found = outcome(ENGINES, exit_status, tmp_path, "part")
    assert found["status"] == status and found["why"].startswith(why)
    # What was known before it ended is kept.
    assert written is None or found["arms"] == {"an arm": {}}


def test_a_part_that_hangs_is_killed_with_what_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = tmp_path / "pid"
    hangs = f"sleep 600 & echo $! > {pid}; wait"
    command = ["sh", "-c", hangs]
    monkeypatch.setattr(Part, "command", lambda *_: command)
    began = time.monotonic()
    found = run_stage({"pairs": Part("tests.gpu.smoke_pairs", 1)}, 1, tmp_path)
    assert time.monotonic() - began < 30
    assert found["pairs"]["status"] == "failed"
    assert found["pairs"]["why"] == "not done after 1 s"
    child = Path(f"/proc/{pid.read_text().strip()}")
    deadline = time.monotonic() + 10
    # Nobody may be there to collect it.
    while child.exists() and "(sleep) Z" not in (child / "stat").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_parts_that_fail_leave_the_others_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of it runs here: on a CPU checks are not run, and these engines end at once."""
    monkeypatch.setattr(Part, "command", lambda *_: ["false"])
    path = tmp_path / "r.json"
    found = smoke.run(list(PARTS), 0, tmp_path, path)
    assert found == json.loads(path.read_text())
    assert {name: part["status"] for name, part in found["parts"].items()} == {
        **dict.fromkeys(("direct", "kernels", "receive"), "not run"),
        **dict.fromkeys(("pairs", "full"), "failed"),
    }
    assert not found["passed"] and found["code"] == code_digest()
    assert "failed   full" in text(found)


def test_on_a_gpu_what_was_not_run_has_not_passed() -> None:
    parts = {"direct": {"status": "not run"}, "pairs": {"status": "passed"}}
    assert smoke.has_passed(parts, 0) and not smoke.has_passed(parts, 1)
    assert smoke.has_passed({"pairs": {"status": "passed"}}, 1)
