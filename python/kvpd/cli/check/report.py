"""An answer for people."""

from __future__ import annotations

from kvpd.cli.check.cost import Cost
from kvpd.cli.check.outcome import Finding
from kvpd.cli.check.result import CheckResult, Side
from kvpd.cli.console import Page, readable_bytes

_STYLES = {"works": "bold green", "refused": "bold red", "unknown": "bold yellow"}
_PLACEMENTS = {
    "as_stock": "as stock",
    "in_place": "in the cache",
    "staged": "in a slab for all of it",
    "direct": "nowhere, read directly",
}


def show(result: CheckResult, page: Page, *, explain: bool = False) -> None:
    """Print the answer, then what it rests on."""
    page.line(_headline(result), _STYLES[result.status])
    page.pairs([("prefill", _side(result.prefill)), ("decode", _side(result.decode))])
    page.pairs([("assumed of the decoder", ", ".join(_assumed(result)))])
    if result.conversion is not None:
        page.pairs([("converted", f"{result.conversion.source} -> {result.conversion.target}")])
    for title, findings in (
        ("refused because", result.reasons),
        ("could not be told", result.doubts),
        ("rests on, and nobody has published", result.unproved if not result.reasons else []),
        ("warnings", result.warnings),
    ):
        if findings:
            page.heading(title)
            _show_findings(findings, page)
    if result.would_convert:
        page.heading("with page_format_conversion on the decoder")
        page.line("  the pair is converted; ask for the plan with --enable-conversion")
    if result.cost is not None:
        _show_cost(result.cost, page, explain)


def _headline(result: CheckResult) -> str:
    whose = "stock decoder" if result.decided_by == "stock" else "decoder"
    if result.status == "refused":
        return f"refused: the {whose} refuses this prefill"
    if result.handshake == "accepted" and result.status == "unknown":
        return f"could not tell: the {whose} accepts this prefill, but not all of it is proved"
    if result.status == "unknown":
        return "could not tell"
    converts = result.verdict == "convert"
    works = "works: pages are converted on the decoder" if converts else "works: equal pages"
    placements = [] if result.cost is None else [cost.placement for cost in result.cost.placements]
    if "direct" in placements:
        return f"{works}, read directly where the prefill's memory can be mapped"
    return works if converts else f"{works}, served as stock does"


def _side(side: Side) -> str:
    pages = side.page_format or "page format unknown"
    return (
        f"{side.source} rank {side.tp_rank}: {side.connector}, {pages}, {side.layout}, "
        f"{side.backend}, blocks of {side.block_size}"
    )


def _assumed(result: CheckResult) -> list[str]:
    assumed = result.assumed
    return [
        f"page_format_conversion {'on' if assumed.page_format_conversion else 'off'}",
        f"require_tagged_peers {'on' if assumed.require_tagged_peers else 'off'}",
        f"enforce_handshake_compat {'on' if assumed.enforce_handshake_compat else 'off'}",
        f"direct_transfer {'on' if assumed.direct_transfer else 'off'}",
        f"allow_other_weights {'on' if assumed.allow_other_weights else 'off'}",
    ]


def _show_findings(findings: list[Finding], page: Page) -> None:
    for finding in findings:
        page.line(f"  {finding.code}: {finding.field}")
        if finding.is_shared:
            page.pairs([("  both", finding.decode)])
        else:
            page.pairs([("  decode", finding.decode), ("  prefill", finding.prefill)])
        page.line(f"    {finding.remedy}")


def _show_cost(cost: Cost, page: Page, explain: bool) -> None:
    page.heading(
        f"{readable_bytes(cost.bytes_per_1k_tokens)} for 1,000 tokens; predicted for "
        f"{cost.num_tokens:,} tokens, {cost.num_pages} blocks of all layers"
    )
    rows = [
        [
            "  " + _PLACEMENTS[placement.placement],
            f"{placement.num_descriptors:,}",
            f"{placement.merged_consecutive:,} to {placement.merged_scattered:,}",
            f"{placement.ms_consecutive:.3g} to {placement.ms_scattered:.3g}",
            "-" if cost.convert_ms is None else f"{cost.convert_ms:.3g}",
        ]
        for placement in cost.placements
    ]
    names = ["  raw pages land", "descriptors", "after merging", "in all ms", "conversion ms"]
    page.table(names, rows, right=4)
    link = cost.link
    page.line(
        "  from consecutive to scattered block ids; link "
        f"{link.bytes_per_second / 1e9:g} GB/s, {link.seconds_per_descriptor * 1e6:g} us a "
        f"descriptor, {link.seconds_per_chunk * 1e6:g} us a READ, conversion "
        f"{link.convert_bytes_per_second / 1e9:g} GB/s, read directly "
        f"{link.direct_bytes_per_second / 1e9:g} GB/s"
    )
    for placement in cost.placements if explain else ():
        page.heading(f"plan, {_PLACEMENTS[placement.placement]}, scattered")
        for line in placement.explanation.splitlines():
            page.line(f"  {line}")
