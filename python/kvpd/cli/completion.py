"""``kvpd completion``: a completion script for bash or zsh, made from the parser by shtab."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

_ADDRESSES = ("engine", "prefill", "decode")

EPILOG = """\
examples:
  eval "$(kvpd completion bash)"                                        this shell
  kvpd completion bash > ~/.local/share/bash-completion/completions/kvpd
  kvpd completion zsh > "${fpath[1]}/_kvpd"
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("shell", choices=("bash", "zsh"), help="whose script")


def run(args: argparse.Namespace) -> int:
    """Print the script.

    Returns:
        0.

    Raises:
        MissingDependencyError: shtab is not installed.
    """
    from kvpd.errors import MissingDependencyError

    try:
        import shtab
    except ImportError as error:
        raise MissingDependencyError(
            "kvpd completion needs shtab: pip install 'kvpd[tools]'",
            code="missing-dependency",
            field="shtab",
            got="not installed",
            expected="kvpd[tools]",
        ) from error
    from kvpd.cli import parser_of

    parser = parser_of(None)
    for action in _actions(parser):
        # An address can be a file too.
        if action.type is Path or action.dest in _ADDRESSES:
            setattr(action, "complete", shtab.FILE)  # noqa: B010 - shtab's own attribute
    print(shtab.complete(parser, args.shell))
    return 0


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """The options and arguments of a parser and of its subcommands."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _actions(command)
