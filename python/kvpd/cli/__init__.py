"""The ``kvpd`` command. Subcommands import what they need when they run."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from kvpd._kvpd import __version__
from kvpd.errors import KvpdError, RefusedError

# Words of the command -> (module with `add_arguments` and `run`, what it does).
_COMMANDS = {
    ("demo",): (
        "kvpd.cli.demo.command",
        "move pages between two processes over NIXL, convert them, and check every byte",
    ),
    ("bench", "convert"): (
        "kvpd.cli.bench_convert",
        "time the conversion kernels, after checking them byte for byte",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand.

    Args:
        argv: arguments without the program's name; those of the process if None.

    Returns:
        The exit status: 0 all held, 1 something did not hold, 2 it could not be run.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    parser = _parser(words)
    args = parser.parse_args(words)
    try:
        return int(importlib.import_module(args.module).run(args))
    except KvpdError as error:
        kind = "refused" if isinstance(error, RefusedError) else "error"
        print(f"kvpd: {kind}: {error}", file=sys.stderr)
        return 1 if isinstance(error, RefusedError) else 2


def _parser(words: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvpd", description="Prefill and decode with different KV page formats."
    )
    parser.add_argument("--version", action="version", version=f"kvpd {__version__}")
    groups: dict[tuple[str, ...], argparse._SubParsersAction[argparse.ArgumentParser]] = {
        (): parser.add_subparsers(required=True, metavar="COMMAND")
    }
    for path, (module, text) in _COMMANDS.items():
        parent = path[:-1]
        if parent not in groups:
            group = groups[parent[:-1]].add_parser(parent[-1], help="measure")
            groups[parent] = group.add_subparsers(required=True, metavar="WHAT")
        command = groups[parent].add_parser(path[-1], help=text, description=text)
        # Only the command that is asked for is imported: the others may need what is not here.
        if tuple(words[: len(path)]) == path:
            importlib.import_module(module).add_arguments(command)
            command.set_defaults(module=module)
    return parser
