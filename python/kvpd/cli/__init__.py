"""The ``kvpd`` command. Subcommands import what they need when they run."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from kvpd._kvpd import __version__
from kvpd.cli.printable import printable
from kvpd.errors import KvpdError, RefusedError

# Words of the command -> (module with `add_arguments` and `run`, what it does).
_COMMANDS = {
    ("inspect",): (
        "kvpd.cli.inspect.command",
        "show what a running engine offers: page formats, regions, versions",
    ),
    ("check",): (
        "kvpd.cli.check.command",
        "tell whether a prefill and a decoder will pair, why, and what it costs",
    ),
    ("formats",): (
        "kvpd.cli.formats.command",
        "the known page formats, and where each element goes",
    ),
    ("demo",): (
        "kvpd.cli.demo.command",
        "move pages between two processes over NIXL, convert them, and check every byte",
    ),
    ("bench", "convert"): (
        "kvpd.cli.bench_convert",
        "time the conversion kernels, after checking them byte for byte",
    ),
    ("bench", "transfer"): (
        "kvpd.cli.bench_transfer",
        "time every way to move pages between two processes, and check every byte",
    ),
    ("bench", "write"): (
        "kvpd.cli.bench_write",
        "time the kernels that write a batch into pages, after checking every bit",
    ),
    ("completion",): ("kvpd.cli.completion", "print a completion script for a shell"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand.

    Args:
        argv: arguments without the program's name; those of the process if None.

    Returns:
        The exit status: 0 all held, 1 something did not hold, 2 it could not be run or told.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    args = parser_of(words).parse_args(words)
    try:
        status = int(importlib.import_module(args.module).run(args))
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # Whoever read our output has seen enough. Python would complain when it closes the pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 2
    except KeyboardInterrupt:
        return 130
    except KvpdError as error:
        kind = "refused" if isinstance(error, RefusedError) else "error"
        text = "\n".join(printable(line) for line in str(error).split("\n"))
        print(f"kvpd: {kind}: {text}", file=sys.stderr)
        return 1 if isinstance(error, RefusedError) else 2


def parser_of(words: Sequence[str] | None) -> argparse.ArgumentParser:
    """The parser of a command line; with the options of every command if `words` is None."""
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
        command = groups[parent].add_parser(
            path[-1],
            help=text,
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        # Only the command that is asked for is imported: the others may need what is not here.
        if words is None or tuple(words[: len(path)]) == path:
            loaded = importlib.import_module(module)
            command.epilog = getattr(loaded, "EPILOG", None)
            loaded.add_arguments(command)
            command.set_defaults(module=module)
    return parser
