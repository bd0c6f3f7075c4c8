"""The command in terminals and pipes, and its help."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from kvpd.cli import main
from tests.inspect_support import SHUFFLED, inspected, tagged


def in_terminal(arguments: list[str], **environment: str) -> bytes:
    """What the command writes to a terminal."""
    ours, theirs = pty.openpty()
    variables = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR")}
    command = [sys.executable, "-m", "kvpd.cli", *arguments]
    with subprocess.Popen(
        command, stdout=theirs, stderr=theirs, env=variables | {"TERM": "xterm"} | environment
    ) as process:
        os.close(theirs)
        written = b""
        while True:
            try:
                chunk = os.read(ours, 1 << 16)
            except OSError:
                break
            if not chunk:
                break
            written += chunk
        assert process.wait(60) == 0
    os.close(ours)
    return written


def test_colours_are_for_terminals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "engine.json"
    shown = inspected(capsys, tagged(SHUFFLED), "--save", str(target))
    assert "\x1b" not in shown
    assert b"\x1b[" in in_terminal(["inspect", str(target)])
    plain = in_terminal(["inspect", str(target)], NO_COLOR="1").decode()
    assert "\x1b[3" not in plain
    # A narrow terminal cuts nothing off.
    assert "aiter-shuffle(H=4, N=16, D=64, bfloat16, v=tiled)" in plain


@pytest.mark.parametrize("options", [[], ["--json"]], ids=["text", "json"])
def test_a_reader_that_goes_away_is_no_traceback(options: list[str]) -> None:
    """And no status 1 either, which would mean a refused pair."""
    ours, theirs = os.pipe()
    os.close(ours)
    command = [sys.executable, "-m", "kvpd.cli", "formats", *options]
    done = subprocess.run(command, stdout=theirs, stderr=subprocess.PIPE, check=False)
    os.close(theirs)
    assert (done.returncode, done.stderr) == (2, b"")


@pytest.mark.parametrize(
    "words",
    [
        ["inspect"],
        ["check"],
        ["formats", "show"],
        ["demo"],
        ["bench", "convert"],
        ["bench", "transfer"],
        ["completion"],
    ],
    ids=lambda words: " ".join(words),
)
def test_help_has_examples(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*words, "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert "examples:\n  " in shown
    assert f"kvpd {' '.join(words)}" in shown.split("examples:")[1]
