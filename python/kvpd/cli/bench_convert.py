"""``kvpd bench convert``: what a conversion costs, against a plain copy of the same bytes.

Every row comes from one loop in which all contestants take turns, so that clocks and temperature
are the same for all. Nothing is timed that was not first compared byte for byte with the reference
conversion. Needs torch, triton, numpy; drawing needs matplotlib and no GPU.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

_SECTIONS = ("main", "shapes", "launch", "sweep")
_FIELDS = ("device", "torch", "triton", "kvpd", "repeat", "writer", "rows", "launch")

EPILOG = """\
examples:
  kvpd bench convert                               on the first GPU
  kvpd bench convert --sections main --shrink 16   a quick look
  kvpd bench convert --from-json docs/data/convert-h200.json    what was measured; needs no GPU

exit status: 0 every page was right and every bar that was measured holds, 1 not, 2 it could not run
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``kvpd bench convert``."""
    parser.add_argument("--device", type=int, default=0, help="GPU to use")
    parser.add_argument("--repeat", type=int, default=30, help="rounds of each timing loop")
    parser.add_argument(
        "--sections",
        default="main,shapes,launch",
        help=f"comma separated, of {', '.join(_SECTIONS)}; sweep tries kernel tunings",
    )
    parser.add_argument(
        "--shrink", type=int, default=1, metavar="N", help="divide the number of blocks, for a look"
    )
    parser.add_argument(
        "--writer",
        type=Path,
        metavar="FILE",
        help="vLLM's rocm_aiter_fa.py, for the baseline that runs its cache writer again; "
        "found by itself where vllm is installed",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the figures")
    parser.add_argument(
        "--from-json", type=Path, metavar="FILE", help="take the figures from FILE, measure nothing"
    )


def run(args: argparse.Namespace) -> int:
    """Measure (or read) the figures, print them, store them, draw them.

    Returns:
        0 if every page was converted right and every bar that was measured holds, 1 otherwise.

    Raises:
        KvpdError: figures cannot be read or written, or something that it needs is missing.
    """
    from kvpd.cli.bench_figures import load, store
    from kvpd.cli.convert_bench import report

    if args.from_json is not None:
        figures = load(args.from_json, "kvpd bench convert", _FIELDS)
    else:
        sections = args.sections.split(",")
        unknown = sorted(set(sections) - set(_SECTIONS))
        if unknown:
            print(f"unknown sections: {', '.join(unknown)}", file=sys.stderr)
            return 2
        from kvpd.cli.convert_bench.suite import measure

        figures = measure(
            sections,
            device=args.device,
            repeat=args.repeat,
            shrink=args.shrink,
            writer_source=args.writer,
            progress=lambda text: print(text, file=sys.stderr, flush=True),
        )
    print(report.text(figures))
    if args.json is not None:
        store(args.json, figures)
    if args.plot is not None:
        from kvpd.cli.convert_bench.plot import draw

        draw(figures, args.plot)
    return 0 if report.holds(figures) else 1
