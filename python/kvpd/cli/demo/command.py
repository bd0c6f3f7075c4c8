"""Arguments and exit status of ``kvpd demo``."""

from __future__ import annotations

import argparse
import json

from kvpd.cli.demo.scenario import ELEMENT_BYTES, Scenario


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags; imports nothing heavy."""
    default = Scenario()
    for flag, name, text in (
        ("--layers", "layers", "layers of the model"),
        ("--heads", "heads", "KV heads of a rank"),
        ("--tokens", "tokens", "tokens per page"),
        ("--head-dim", "head_dim", "head size"),
        ("--blocks", "blocks", "pages moved per layer, over all requests"),
        ("--requests", "requests", "requests; the first half one by one, the rest at once"),
        ("--seed", "seed", "of tokens and block ids"),
    ):
        parser.add_argument(
            flag,
            type=int,
            default=getattr(default, name),
            metavar="N",
            help=f"{text} (default: %(default)s)",
        )
    parser.add_argument(
        "--dtype",
        choices=sorted(ELEMENT_BYTES),
        default=default.dtype,
        help="element type of both caches (default: %(default)s)",
    )
    parser.add_argument(
        "--placement",
        choices=("in_place", "staged", "both"),
        default="both",
        help="where raw pages land before they are converted (default: %(default)s)",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=120.0,
        metavar="SECONDS",
        help="patience with any single step (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object and no text")


def run(args: argparse.Namespace) -> int:
    """Run the demo and print what it found.

    Returns:
        0 when everything held, 1 when not.

    Raises:
        KvpdError: a shape that cannot be, a missing dependency, or a set-up that failed.
    """
    import kvpd.convert  # noqa: F401 - where torch is missing, this names the extra
    from kvpd.cli.demo.decode import num_steps, placements_of, run_demo
    from kvpd.cli.demo.progress import progress
    from kvpd.cli.demo.report import as_json, as_text

    scenario = Scenario(
        layers=args.layers,
        heads=args.heads,
        tokens=args.tokens,
        head_dim=args.head_dim,
        dtype=args.dtype,
        blocks=args.blocks,
        requests=args.requests,
        seed=args.seed,
    )
    placements = placements_of(args.placement)
    with progress("kvpd demo", num_steps(placements), quiet=args.json) as advance:
        result = run_demo(scenario, placements, timeout_seconds=args.timeout, advance=advance)
    if args.json:
        print(json.dumps(as_json(result), indent=2))
    else:
        for line in as_text(result):
            print(line)
    return 0 if result.holds else 1
