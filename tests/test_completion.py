"""``kvpd completion``: the scripts are asked in a shell what they complete."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvpd.cli import main
from kvpd.errors import MissingDependencyError

BASH = shutil.which("bash")


def script(shell: str, capsys: pytest.CaptureFixture[str], directory: Path) -> Path:
    assert main(["completion", shell]) == 0
    path = directory / f"kvpd.{shell}"
    path.write_text(capsys.readouterr().out)
    return path


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["ins"], {"inspect"}),
        (["check", "--enable"], {"--enable-conversion"}),
        (["formats", "show", "aiter"], {"aiter-shuffle", "aiter-shuffle-transposed"}),
        (["completion", ""], {"bash", "zsh"}),
        (["bench", "c"], {"convert"}),
        (["inspect", "saved-"], {"saved-engine.json"}),
    ],
    ids=lambda value: " ".join(value),
)
def test_bash(
    words: list[str], expected: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if BASH is None:
        pytest.skip("no bash")
    (tmp_path / "saved-engine.json").touch()
    path = script("bash", capsys, tmp_path)
    quoted = " ".join(f"'{word}'" for word in ["kvpd", *words])
    before = words[-2] if len(words) > 1 else "kvpd"
    program = f"""
source {path}
COMP_WORDS=({quoted}); COMP_CWORD={len(words)}
function=$(complete -p kvpd | sed 's/.*-F \\([^ ]*\\).*/\\1/')
"$function" kvpd '{words[-1]}' '{before}'
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    done = subprocess.run(
        [BASH, "-c", program], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert set(done.stdout.split()) == expected


def test_zsh(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = script("zsh", capsys, tmp_path)
    text = path.read_text()
    assert text.startswith("#compdef kvpd\n")
    for word in ("inspect", "--enable-conversion", "--us-per-descriptor", "aiter-shuffle"):
        assert word in text
    zsh = shutil.which("zsh")
    if zsh is not None:
        subprocess.run([zsh, "-n", str(path)], check=True)


def test_without_shtab_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    from kvpd.cli import completion, parser_of

    arguments = parser_of(["completion"]).parse_args(["completion", "bash"])
    with pytest.raises(MissingDependencyError) as caught:
        completion.run(arguments)
    assert caught.value.expected == "kvpd[tools]"
