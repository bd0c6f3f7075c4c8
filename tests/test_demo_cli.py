"""The ``kvpd`` command itself: light to start, clear when it fails."""

from __future__ import annotations

import argparse
import os
import pty
import subprocess
import sys

import pytest

import kvpd
import kvpd.cli
from kvpd.cli.demo.progress import progress
from kvpd.errors import TransferError


def test_the_command_line_imports_nothing_heavy() -> None:
    code = (
        "import sys, kvpd.cli\n"
        "for words in (['--help'], ['demo', '--help']):\n"
        "    try: kvpd.cli.main(words)\n"
        "    except SystemExit: pass\n"
        "heavy = {'torch', 'triton', 'nixl', 'nixl._api', 'vllm', 'msgspec'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "demo" in done.stdout and "bench" in done.stdout and "--placement" in done.stdout


@pytest.mark.parametrize("words", [[], ["no-such-command"], ["bench"], ["demo", "--layers", "x"]])
def test_words_that_are_no_command(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        kvpd.cli.main(words)
    assert caught.value.code == 2
    assert "usage: kvpd" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        kvpd.cli.main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"kvpd {kvpd.__version__}\n"


def test_an_error_of_ours_is_one_line_and_status_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(args: argparse.Namespace) -> int:
        raise TransferError("the link is down", code="nixl", field="read")

    monkeypatch.setattr("kvpd.cli.demo.command.run", run)
    assert kvpd.cli.main(["demo"]) == 2
    assert capsys.readouterr().err == "kvpd: error: the link is down\n"


@pytest.mark.parametrize(("missing", "extra"), [("torch", "convert"), ("nixl", "nixl")])
def test_what_is_not_installed_is_named_with_its_extra(missing: str, extra: str) -> None:
    """`None` in `sys.modules` makes an import fail as if the package were not there."""
    hidden = {
        "torch": ["torch"],
        "nixl": ["nixl", "nixl_cu12", "nixl_cu13", "nixl_rocm"],
    }[missing]
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({hidden}))\n"
        "import kvpd.cli; sys.exit(kvpd.cli.main(['demo', '--blocks', '4']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("kvpd: error: ") and f"kvpd[{extra}]" in done.stderr
    assert "Traceback" not in done.stderr


def test_progress_is_silent_where_nobody_looks(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("work", 2, quiet=False) as advance:
        advance()
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("no_color", [False, True])
def test_progress_on_a_terminal(no_color: bool) -> None:
    code = (
        "from kvpd.cli.demo.progress import progress\n"
        "with progress('moving pages', 2, quiet=False) as advance:\n"
        "    advance(); advance()\n"
    )
    ours, theirs = pty.openpty()
    environment = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "TERM", "CI")}
    environment["TERM"] = "xterm-256color"
    if no_color:
        environment["NO_COLOR"] = "1"
    subprocess.run([sys.executable, "-c", code], stderr=theirs, env=environment, check=True)
    os.close(theirs)
    shown = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert "moving pages" in shown
    assert ("\x1b[38;5;" in shown or "\x1b[3" in shown) != no_color
