"""``kvpd bench write``: what writing a batch into pages costs, with RoPE and QK norm on the way.

Every time is of all layers of a model in one CUDA graph. Nothing is timed that was not first
compared, bit for bit, with vLLM's separate kernels or, where they are missing, with the reference.
Needs torch, triton, numpy; drawing needs matplotlib and no GPU.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

_SECTIONS = ("main", "formats", "host", "sweep")
_FIELDS = ("device", "torch", "triton", "kvpd", "repeat", "missing", "rows", "host")

EPILOG = """\
examples:
  kvpd bench write                                 on the first GPU
  kvpd bench write --from-json docs/data/write-h200.json    what was measured; needs no GPU

exit status: 0 every bit was right and every bar that was measured holds, 1 not, 2 it could not run
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``kvpd bench write``."""
    parser.add_argument("--device", type=int, default=0, help="GPU to use")
    parser.add_argument("--repeat", type=int, default=30, help="replays of each graph")
    parser.add_argument(
        "--sections",
        default="main,formats,host",
        help=f"comma separated, of {', '.join(_SECTIONS)}; sweep tries kernel tunings",
    )
    parser.add_argument(
        "--writer",
        type=Path,
        metavar="FILE",
        help="vLLM's rocm_aiter_fa.py, which has its shuffle writer; found by itself where vllm is "
        "installed, as its other kernels are",
    )
    parser.add_argument(
        "--aiter",
        type=Path,
        metavar="FOLDER",
        help="AITER's package; found by itself where amd-aiter is installed",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the figures")
    parser.add_argument(
        "--from-json", type=Path, metavar="FILE", help="take the figures from FILE, measure nothing"
    )


def run(args: argparse.Namespace) -> int:
    """Measure (or read) the figures, print them, store them, draw them.

    Returns:
        0 if every bit was right and every bar that was measured holds, 1 otherwise.

    Raises:
        KvpdError: figures cannot be read or written, or something that it needs is missing.
    """
    from kvpd.cli.bench_figures import load, store
    from kvpd.cli.write_bench import report

    if args.from_json is not None:
        figures = load(args.from_json, "kvpd bench write", _FIELDS)
    else:
        sections = args.sections.split(",")
        unknown = sorted(set(sections) - set(_SECTIONS))
        if unknown:
            print(f"unknown sections: {', '.join(unknown)}", file=sys.stderr)
            return 2
        from kvpd.cli.write_bench.suite import measure

        figures = measure(
            sections,
            device=args.device,
            repeat=args.repeat,
            writer_source=args.writer,
            aiter=args.aiter,
            progress=lambda text: print(text, file=sys.stderr, flush=True),
        )
    print(report.text(figures))
    if args.json is not None:
        store(args.json, figures)
    if args.plot is not None:
        from kvpd.cli.write_bench.plot import draw

        draw(figures, args.plot)
    return 0 if report.holds(figures) else 1
