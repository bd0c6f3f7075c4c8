"""Arguments of ``kvpd formats`` and ``kvpd formats show``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kvpd.cli.formats.known import BY_NAME
from kvpd.cli.inspect.command import natural

EPILOG = """\
examples:
  kvpd formats                                    the known page formats
  kvpd formats show standard aiter-shuffle        a small page in both, and what moves where
  kvpd formats show standard aiter-shuffle --heads 2 --tokens 16 --head-dim 16 --svg pages.svg
  kvpd formats show aiter-shuffle --element v,1,5,9 --heads 8 --head-dim 128
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options; imports nothing heavy."""
    parser.add_argument("--json", action="store_true", help="print one JSON object and no text")
    what = parser.add_subparsers(dest="what", metavar="WHAT")
    show = what.add_parser(
        "show",
        help="draw where each element of a page goes",
        description="Draw where each element of a page goes, one picture a format.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    show.add_argument(
        "names",
        nargs="+",
        choices=sorted(BY_NAME),
        metavar="FORMAT",
        help=f"of {', '.join(BY_NAME)}",
    )
    for flag, default, text in (
        ("--heads", 2, "KV heads of a page"),
        ("--tokens", 16, "tokens of a page"),
        ("--head-dim", 16, "channels of a head"),
    ):
        show.add_argument(
            flag, type=natural, default=default, metavar="N", help=f"{text} (default: %(default)s)"
        )
    show.add_argument("--dtype", default="bfloat16", help="element type (default: %(default)s)")
    show.add_argument(
        "--element",
        type=element,
        default=None,
        metavar="K|V,HEAD,TOKEN,CHANNEL",
        help="follow this element through all formats",
    )
    show.add_argument("--svg", type=Path, metavar="FILE", help="draw every element into FILE")
    show.add_argument("--json", action="store_true", help="print one JSON object and no text")


def element(text: str) -> tuple[str, int, int, int]:
    """A component and three numbers."""
    component, *numbers = text.lower().split(",")
    if component not in ("k", "v") or len(numbers) != 3:
        raise argparse.ArgumentTypeError("expected for example k,1,5,9")
    head, token, channel = (int(number) for number in numbers)
    if min(head, token, channel) < 0:
        raise argparse.ArgumentTypeError("head, token and channel count from 0")
    return component, head, token, channel


def run(args: argparse.Namespace) -> int:
    """Print the cheat sheet or the pictures.

    Returns:
        0.

    Raises:
        KvpdError: no such page can be, or the file cannot be written.
    """
    from kvpd.cli.console import Page
    from kvpd.cli.formats import sheet

    if args.what is None:
        if args.json:
            sys.stdout.write(sheet.to_json().decode())
        else:
            sheet.show(Page())
        return 0
    return _show(args)


def _show(args: argparse.Namespace) -> int:
    from kvpd.cli.console import Page
    from kvpd.cli.formats.drawing import drawing_of
    from kvpd.cli.formats.picture import show
    from kvpd.cli.formats.svg import svg_of
    from kvpd.errors import KvpdError

    drawing = drawing_of(
        args.names, args.heads, args.tokens, args.head_dim, args.dtype, args.element
    )
    if args.svg is not None:
        try:
            args.svg.write_text(svg_of(drawing), encoding="utf-8")
        except OSError as error:
            raise KvpdError(
                f"{args.svg}: {error.strerror}", code="unwritable", field="svg", got=args.svg
            ) from error
    if args.json:
        sys.stdout.write(drawing.to_json().decode())
    else:
        show(drawing, Page())
    return 0
