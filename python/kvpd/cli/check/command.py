"""Arguments and exit status of ``kvpd check``."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvpd._kvpd import LinkModel
    from kvpd.cli.check.cost import Cost
    from kvpd.words import Memory

EPILOG = """\
examples:
  kvpd check 10.0.0.1:5600 10.0.0.2:5600                        will this decoder read this prefill?
  kvpd check 10.0.0.1:5600 10.0.0.2:5600 --enable-conversion    and if it converted?
  kvpd check prefill.json decode.json --json                    of files of `kvpd inspect --save`

What the decoder's operator configured is not published. It is assumed to be vLLM's and kvpd's
defaults unless an option says otherwise.

exit status: 0 works, 1 refused, 2 could not tell (or an engine could not be asked)
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options; imports nothing heavy."""
    from kvpd.cli.inspect.command import add_rank_arguments, positive

    text = "side channel HOST:PORT of the {}, or a file of `kvpd inspect --save`"
    parser.add_argument("prefill", metavar="P", help=text.format("prefill"))
    parser.add_argument("decode", metavar="D", help=text.format("decoder"))
    decoder = parser.add_argument_group("configuration of the decoder")
    decoder.add_argument(
        "--enable-conversion", action="store_true", help="page_format_conversion is true"
    )
    decoder.add_argument(
        "--require-tagged-peers", action="store_true", help="require_tagged_peers is true"
    )
    decoder.add_argument(
        "--no-enforce-handshake-compat",
        action="store_true",
        help="enforce_handshake_compat is false",
    )
    decoder.add_argument(
        "--direct-transfer",
        action="store_true",
        help="direct_transfer is true, on the prefill's host",
    )
    decoder.add_argument(
        "--allow-other-weights", action="store_true", help="allow_other_weights is true"
    )
    link = parser.add_argument_group(
        "link", "defaults: two H200 over NVLink; two processes of a host"
    )
    link.add_argument(
        "--link",
        type=rates,
        default={},
        metavar="JSON",
        help="rates as in kv_connector_extra_config.link",
    )
    link.add_argument(
        "--link-gb-per-second",
        type=positive,
        metavar="X",
        help="rate of the link, 1e9 bytes a second",
    )
    link.add_argument(
        "--us-per-descriptor",
        type=positive,
        metavar="X",
        help="time of each merged NIXL descriptor",
    )
    link.add_argument(
        "--convert-gb-per-second", type=positive, metavar="X", help="rate of the conversion"
    )
    link.add_argument(
        "--explain", action="store_true", help="also say how the planner came to its times"
    )
    add_rank_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object and no text")


def run(args: argparse.Namespace) -> int:
    """Ask both, decide, print.

    Returns:
        0 works, 1 refused, 2 could not tell.

    Raises:
        KvpdError: an engine could not be asked, or the decoder's tag cannot be read.
    """
    from kvpd.cli.check.cost import cost_of
    from kvpd.cli.check.outcome import Assumed, outcome_of
    from kvpd.cli.check.report import show
    from kvpd.cli.check.result import EXIT_STATUS, result_of
    from kvpd.cli.console import Page
    from kvpd.cli.inspect.engine import Rank, engine_of

    rank = Rank(args.tp_rank, args.tp_size, args.timeout)
    prefill, decode = engine_of(args.prefill, rank), engine_of(args.decode, rank)
    assumed = Assumed(
        page_format_conversion=args.enable_conversion,
        require_tagged_peers=args.require_tagged_peers,
        enforce_handshake_compat=not args.no_enforce_handshake_compat,
        direct_transfer=args.direct_transfer,
        allow_other_weights=args.allow_other_weights,
    )
    outcome = outcome_of(prefill, decode, assumed)
    cost: Cost | None = None
    # An untagged side was accepted because its regions are the other one's.
    local, remote = decode.tag or prefill.tag, prefill.tag or decode.tag
    if outcome.handshake == "accepted" and local is not None and remote is not None:
        link = _link(args, local.description.regions[0].memory)
        converts = outcome.verdict is not None and outcome.verdict.kind == "convert"
        cost = cost_of(
            remote.description,
            local.description,
            link,
            converts=converts,
            direct=outcome.is_direct,
        )
    result = result_of(prefill, decode, assumed, outcome, cost)
    if args.json:
        sys.stdout.write(result.to_json().decode())
    else:
        show(result, Page(), explain=args.explain)
    return EXIT_STATUS[result.status]


def _link(args: argparse.Namespace, memory: Memory) -> LinkModel:
    from kvpd.vllm.config import ConnectorConfig

    given = {
        "bytes_per_second": args.link_gb_per_second and 1e9 * args.link_gb_per_second,
        "seconds_per_descriptor": args.us_per_descriptor and 1e-6 * args.us_per_descriptor,
        "convert_bytes_per_second": args.convert_gb_per_second and 1e9 * args.convert_gb_per_second,
    }
    known = {name: value for name, value in given.items() if value is not None}
    # As the connector reads its key of that name, with the same errors.
    return ConnectorConfig.of({"link": args.link | known}).link_model(memory)


def rates(text: str) -> dict[str, float]:
    """An argument like the connector's ``link``."""
    value = json.loads(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("expected a JSON object")
    return value
