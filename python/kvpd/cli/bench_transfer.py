"""``kvpd bench transfer``: what moving pages between two processes costs, by every scheme.

Stock's scheme for equal formats, half pages, staged, and direct take turns in one run, on
consecutive, reversed, random and recorded block ids. Every arm is compared byte for byte, poison
around the cache included, before and after it is timed. Needs NIXL and torch; two GPUs to measure a
link, one or none to check bytes.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

_ARMS = ("stock", "half", "staged", "direct")
_PATTERNS = ("consecutive", "reversed", "random")
_FIELDS = (
    *("device", "torch", "nixl", "kvpd", "scenario", "has_link", "repeat", "slab_bytes"),
    *("num_slots", "not_run", "rows", "link", "victims", "prefill_unchanged"),
)

EPILOG = """\
examples:
  kvpd bench transfer                              on two GPUs, or one (then without a link)
  kvpd bench transfer --traces tests/vectors/block_ids/*.json --json figures.json
  kvpd bench transfer --device cpu --layers 2 --cache-blocks 64 --blocks 1,16 --slab-mb 16
  kvpd bench transfer --from-json docs/data/transfer-h200.json    what was measured

exit status: 0 every byte was right, 1 not, 2 it could not run
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``kvpd bench transfer``."""
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="where the caches are: on two GPUs (or one, without a link), or in host memory",
    )
    parser.add_argument("--prefill-gpu", type=int, default=0, metavar="N")
    parser.add_argument(
        "--decode-gpu", type=int, metavar="N", help="default: 1, or 0 where there is only one"
    )
    for flag, default, text in (
        ("--layers", 36, "layers"),
        ("--heads", 8, "KV heads of a rank"),
        ("--tokens", 16, "tokens per page"),
        ("--head-dim", 128, "head size"),
        ("--cache-blocks", 4096, "blocks of each cache"),
        ("--repeat", 15, "rounds of each timing loop"),
        ("--slab-mb", 2048, "slab of the staged arm, megabytes"),
        ("--slots", 4, "slots of the slab"),
        ("--nixl-threads", 4, "threads with which NIXL posts, as many as in vLLM's connector"),
    ):
        parser.add_argument(
            flag, type=int, default=default, metavar="N", help=f"{text} (default: {default})"
        )
    parser.add_argument(
        "--blocks", default="1,256,1024", help="blocks of a request, comma separated"
    )
    parser.add_argument(
        "--patterns", default=",".join(_PATTERNS), help=f"of {', '.join(_PATTERNS)}"
    )
    parser.add_argument("--arms", default=",".join(_ARMS), help=f"of {', '.join(_ARMS)}")
    parser.add_argument(
        "--traces",
        type=Path,
        nargs="*",
        default=[],
        metavar="FILE",
        help="block ids recorded from an engine (tests/vectors/block_ids)",
    )
    parser.add_argument(
        "--trace-requests", type=int, default=8, metavar="N", help="longest requests of a trace"
    )
    parser.add_argument(
        "--victims",
        action="store_true",
        help="also what transfers of up to 256 random blocks do to other work on the GPU",
    )
    parser.add_argument(
        "--timeout", type=float, default=600.0, metavar="SECONDS", help="for the prefill's answers"
    )
    parser.add_argument("--explain", action="store_true", help="print what was planned, and why")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the figures")
    parser.add_argument(
        "--from-json", type=Path, metavar="FILE", help="take the figures from FILE, measure nothing"
    )


def run(args: argparse.Namespace) -> int:
    """Measure (or read) the figures, print them, store them, draw them.

    Returns:
        0 if every byte was right, 1 otherwise, 2 for arguments that cannot be; bars are shown and
        decide nothing, since they are of one machine.

    Raises:
        KvpdError: figures cannot be read or written, or the transfers failed.
    """
    from kvpd.cli.bench_figures import load, store
    from kvpd.cli.transfer_bench import report

    if args.from_json is not None:
        figures = load(args.from_json, "kvpd bench transfer", _FIELDS)
    else:
        complaint = _complaint(args)
        if complaint:
            print(complaint, file=sys.stderr)
            return 2
        figures = _measure(args)
    print(report.text(figures))
    if args.json is not None:
        store(args.json, figures)
    if args.explain:
        for row in figures["rows"]:
            print(f"\n{row['pattern']}, {row['blocks']} blocks, {row['arm']}: {row['explained']}")
    if args.plot is not None:
        from kvpd.cli.transfer_bench.plot import draw

        draw(figures, args.plot)
    return 0 if report.holds(figures) else 1


def _complaint(args: argparse.Namespace) -> str:
    for flag, text, known in (
        ("--arms", args.arms, _ARMS),
        ("--patterns", args.patterns, (*_PATTERNS, "")),
    ):
        unknown = sorted(set(text.split(",")) - set(known))
        if unknown:
            return f"{flag}: unknown {', '.join(unknown)}"
    if not all(part.isdecimal() and int(part) > 0 for part in args.blocks.split(",")):
        return f"--blocks: {args.blocks} is no list of numbers above 0"
    if args.repeat < 1:
        return "--repeat: at least 1"
    return ""


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    import torch

    from kvpd._kvpd import LinkModel
    from kvpd.cli.transfer_bench.patterns import recorded, synthetic
    from kvpd.cli.transfer_bench.scenario import Scenario
    from kvpd.cli.transfer_bench.suite import measure
    from kvpd.errors import KvpdError

    num_gpus = torch.cuda.device_count()
    on_gpu = args.device == "cuda"
    if on_gpu and not num_gpus:
        raise KvpdError(
            "torch sees no GPU; --device cpu checks bytes in host memory, with smaller --layers, "
            "--cache-blocks and --slab-mb",
            code="no-gpu",
            field="device",
            got=num_gpus,
            expected="two GPUs, or one",
        )
    decode_gpu = min(1, max(num_gpus - 1, 0)) if args.decode_gpu is None else args.decode_gpu
    scenario = Scenario(
        layers=args.layers,
        heads=args.heads,
        tokens=args.tokens,
        head_dim=args.head_dim,
        num_blocks=args.cache_blocks,
        prefill_device=f"cuda:{args.prefill_gpu}" if on_gpu else "cpu",
        decode_device=f"cuda:{decode_gpu}" if on_gpu else "cpu",
        nixl_threads=args.nixl_threads,
    )
    workloads = [
        synthetic(pattern, int(count), args.cache_blocks)
        for count in args.blocks.split(",")
        for pattern in args.patterns.split(",")
        if pattern
    ]
    workloads += recorded(args.traces, args.cache_blocks, args.trace_requests)
    return measure(
        scenario,
        workloads,
        args.arms.split(","),
        repeat=args.repeat,
        slab_bytes=args.slab_mb << 20,
        num_slots=args.slots,
        link=LinkModel("vram" if on_gpu else "dram"),
        victims=args.victims and on_gpu,
        timeout_seconds=args.timeout,
        progress=lambda text: print(text, file=sys.stderr, flush=True),
    )
