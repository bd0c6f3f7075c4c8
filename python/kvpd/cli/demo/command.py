"""Arguments and exit status of ``kvpd demo``."""

from __future__ import annotations

import argparse
import json

from kvpd.cli.demo.scenario import ELEMENT_BYTES, Scenario
from kvpd.errors import KvpdError

EPILOG = """\
examples:
  kvpd demo                       both placements, a small cache
  kvpd demo --dtype float16 --placement staged
  kvpd demo --vllm                in real vLLM, from a checkout

exit status: 0 everything held, 1 something did not, 2 it could not run
"""


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
        help="element type of both caches; one that is not converted shows the refusal "
        "(default: %(default)s)",
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
    parser.add_argument(
        "--vllm",
        action="store_true",
        help="instead: prefill and decode in real vLLM on CPUs, vLLM's connector, then kvpd's. "
        "Needs a checkout of the project, where the test bed is, and vLLM; takes no other option",
    )


def run(args: argparse.Namespace) -> int:
    """Run the demo and print what it found.

    Returns:
        0 when everything held, 1 when not.

    Raises:
        KvpdError: a shape that cannot be, a missing dependency, or a set-up that failed.
    """
    if args.vllm:
        from kvpd.cli.demo.in_vllm import run_in_vllm

        _check_alone(args)
        return run_in_vllm()
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


def _check_alone(args: argparse.Namespace) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    defaults = vars(parser.parse_args(["--vllm"]))
    others = [name for name, value in defaults.items() if getattr(args, name) != value]
    if others:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in others)
        raise KvpdError(
            f"--vllm has a scenario of its own and takes no {flags}",
            code="options-exclude-each-other",
            field=flags,
            got="with --vllm",
            expected="one or the other",
        )
