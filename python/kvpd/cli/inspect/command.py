"""Arguments and exit status of ``kvpd inspect``."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

EPILOG = """\
examples:
  kvpd inspect 10.0.0.1:5600                     what this engine offers
  kvpd inspect 10.0.0.1:5600 --save prefill.json  the same, kept for `kvpd check`
  kvpd inspect '[fd00::1]:5600' --tp-rank 3 --json

The address is the engine's NIXL side channel: VLLM_NIXL_SIDE_CHANNEL_HOST and
VLLM_NIXL_SIDE_CHANNEL_PORT, not the HTTP port. It is asked what a decoder asks, and neither memory
handles nor NIXL's keys are shown or saved.

exit status: 0 shown, 2 the engine could not be asked
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options; imports nothing heavy."""
    parser.add_argument("engine", metavar="HOST:PORT", help="side channel of an engine, or a file")
    add_rank_arguments(parser)
    parser.add_argument("--save", type=Path, metavar="FILE", help="also write the JSON to FILE")
    parser.add_argument("--json", action="store_true", help="print one JSON object and no text")


def add_rank_arguments(parser: argparse.ArgumentParser) -> None:
    """Which rank is asked, and how patiently."""
    parser.add_argument(
        "--tp-rank",
        type=natural,
        default=0,
        metavar="N",
        help="tensor-parallel rank to ask for (default: %(default)s)",
    )
    parser.add_argument(
        "--tp-size",
        type=natural,
        metavar="N",
        help="ranks of a stock engine, which does not say; needed for a rank above 0",
    )
    parser.add_argument(
        "--timeout",
        type=positive,
        default=5.0,
        metavar="SECONDS",
        help="patience with the engine (default: %(default)s)",
    )


def natural(text: str) -> int:
    """An argument that counts something."""
    number = int(text)
    if not 0 <= number < 1 << 31:
        raise argparse.ArgumentTypeError(f"{number} is not between 0 and 2147483647")
    return number


def positive(text: str) -> float:
    """A positive, finite number."""
    number = float(text)
    if not (math.isfinite(number) and number > 0):
        raise argparse.ArgumentTypeError(f"{text} is no positive number")
    return number


def run(args: argparse.Namespace) -> int:
    """Ask, print, save.

    Returns:
        0.

    Raises:
        KvpdError: the engine could not be asked, or the file not written.
    """
    from kvpd.cli.console import Page
    from kvpd.cli.inspect.engine import Rank, engine_of
    from kvpd.cli.inspect.inspection import Inspection
    from kvpd.cli.inspect.report import show
    from kvpd.errors import KvpdError

    engine = engine_of(args.engine, Rank(args.tp_rank, args.tp_size, args.timeout))
    inspection = Inspection.of(engine.published, engine.source, engine.tp_rank)
    if args.save is not None:
        try:
            args.save.write_bytes(inspection.to_json())
        except OSError as error:
            raise KvpdError(
                f"{args.save}: {error.strerror}", code="unwritable", field="save", got=args.save
            ) from error
    if args.json:
        sys.stdout.write(inspection.to_json().decode())
    else:
        show(inspection, Page())
    return 0
