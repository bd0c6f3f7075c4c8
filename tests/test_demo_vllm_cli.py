"""``kvpd demo --vllm`` where it cannot run; what it shows is tests/vllm/test_demo.py."""

from __future__ import annotations

from pathlib import Path

import pytest

import kvpd.cli
from kvpd.cli.demo.in_vllm import run_in_vllm
from kvpd.errors import MissingDependencyError


def test_outside_of_a_checkout_it_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MissingDependencyError) as caught:
        run_in_vllm(tmp_path / "lib" / "site-packages" / "kvpd")
    assert caught.value.code == "no-checkout"
    assert "make demo" in str(caught.value) and str(tmp_path) in caught.value.got


def test_options_of_the_other_demo_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert kvpd.cli.main(["demo", "--vllm", "--layers", "3", "--json"]) == 2
    error = capsys.readouterr().err
    assert "--layers" in error and "--json" in error and "--heads" not in error
