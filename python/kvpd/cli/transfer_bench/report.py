"""Figures as a table, and the bars they are held to. Needs nothing but the figures."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

Figures = dict[str, Any]
Bar = tuple[str, float | None, str, bool]
_VICTIM_BYTES = 0.604e9
_BLOCKS_4K, _BLOCKS_16K = 256, 1024


def text(figures: Figures) -> str:
    """Everything in a form to read."""
    scenario = figures["scenario"]
    lines = [
        f"{figures['device']}, torch {figures['torch']}, NIXL {figures['nixl']}, "
        f"kvpd {figures['kvpd']}, {figures['repeat']} rounds; medians (p10-p90) in ms",
        f"{scenario['layers']} layers, pages [{scenario['heads']} heads, {scenario['tokens']} "
        f"tokens, 2x{scenario['head_dim']}] bfloat16; prefill on {scenario['prefill_device']}, "
        f"decoder on {scenario['decode_device']}, two processes; slab "
        f"{figures['slab_bytes'] / 1e6:.0f} MB in {figures['num_slots']} slots, "
        f"{scenario['nixl_threads']} threads of NIXL",
    ]
    if not figures["has_link"]:
        lines.append("NO LINK IS MEASURED: both caches are in the same memory")
    lines += [f"{name}: not run, {reason}" for name, reason in figures["not_run"].items()]
    lines += [
        "",
        "pages/run: on both sides, on the prefill alone. read: until the last byte was read; "
        "convert: what was added after that.",
        f"{'ids':22} {'blocks':>6} {'pages/run':>15}  {'arm':8}{'total':>9}{'p10-p90':>17}"
        f"{'predicted':>10}{'read':>9}"
        f"{'convert':>9}{'post':>8}{'GB/s':>8}{'descriptors: before':>21}{'after':>8}{'NIXL':>8}"
        "  bytes",
    ]
    for row in figures["rows"]:
        total, descriptors = row["total"], row["descriptors"]
        spread = f"{1e3 * total['p10']:.2f}-{1e3 * total['p90']:.2f}"
        runs = f"{row['pages_per_run']:.1f}, {row['pages_per_remote_run']:.1f}"
        predicted = "-" if row["predicted"] is None else f"{1e3 * row['predicted']:.3f}"
        counted = "-" if descriptors["counted"] is None else descriptors["counted"]
        lines.append(
            f"{row['pattern']:22} {row['blocks']:6} {runs:>15}  {row['arm']:8}"
            f"{1e3 * total['median']:9.3f}{spread:>17}{predicted:>10}"
            f"{1e3 * row['read']['median']:9.3f}"
            f"{1e3 * row['convert']['median']:9.3f}{1e3 * row['post']['median']:8.3f}"
            f"{row['gigabytes_per_s']:8.1f}{descriptors['planned']:21}{descriptors['merged']:8}"
            f"{counted:>8}  {'right' if row['right'] else 'WRONG'}"
        )
    if figures["link"] is not None and figures["has_link"]:
        rates = {name: float(f"{value:.3g}") for name, value in figures["link"].items()}
        lines += ["", f'READs here are fitted best by the key "link": {json.dumps(rates)}']
    if figures["victims"]:
        lines += ["", "what a transfer adds to work on the decoder's GPU (random ids), ms"]
    for row in figures["victims"]:
        lines.append(
            f"  {row['victim']:16} beside {row['arm']:8}{row['blocks']:6} blocks: "
            f"+{1e3 * row['slowdown']:.2f} ({1e3 * row['slowdown_p10']:.2f}-"
            f"{1e3 * row['slowdown_p90']:.2f}) on {1e3 * row['alone']:.2f}; "
            f"the transfer took {1e3 * row['transfer']:.2f}"
        )
    if not figures["prefill_unchanged"]:
        lines.append("THE PREFILL'S CACHE CHANGED")
    lines += ["", "bars"]
    for name, value, bar, holds in bars(figures):
        verdict = "not measured" if value is None else "holds" if holds else "MISSED"
        shown = "-" if value is None else f"{value:.3g}"
        lines.append(f"  {name:64}{shown:>8}  {bar:10}{verdict}")
    return "\n".join(lines)


def holds(figures: Figures) -> bool:
    """Whether all bytes were right; how long anything took decides nothing."""
    right = all(row["right"] for row in figures["rows"])
    return right and bool(figures["rows"]) and bool(figures["prefill_unchanged"])


def bars(figures: Figures) -> Iterator[Bar]:
    """(what, value or None if not measured, the bar, whether it holds).

    Those of a link between GPUs are not measured without one, and the other way round.
    """
    rows = figures["rows"] if figures["has_link"] else []
    for blocks, size in ((_BLOCKS_4K, "4k"), (_BLOCKS_16K, "16k")):
        direct = _rows(rows, "direct", "random", blocks)
        yield _bar(
            f"direct, random ids, {size}: GB/s",
            [row["gigabytes_per_s"] for row in direct],
            ">= 340",
        )
        faster = _over(rows, "stock", "direct", "random", blocks)
        yield _bar(f"direct, random ids, {size}: times faster than stock", faster, ">= 15")
    one = [1e6 * row["total"]["median"] for row in _rows(rows, "direct", None, 1)]
    yield _bar("direct, 1 block x all layers: us until done", one, "<= 60")
    added = [
        1e3 * row["slowdown"] * _VICTIM_BYTES / (row["blocks"] * _block_bytes(figures))
        for row in figures["victims"]
        if figures["has_link"]
        and (row["arm"], row["victim"]) == ("direct", "bandwidth-bound")
        # What a single block adds, scaled up by hundreds, would be noise.
        and row["blocks"] >= _BLOCKS_4K
    ]
    yield _bar("direct: ms added to the bandwidth-bound victim per 0.6 GB", added, "<= 0.7")
    for pattern, bar in (("random", "<= 1.05"), ("consecutive", "<= 1.2")):
        slower = _over(rows, "staged", "stock", pattern, _BLOCKS_4K)
        yield _bar(f"staged, {pattern} ids, 4k: of stock's time", slower, bar)
    of_stock, of_time = _recorded(rows)
    yield _bar("staged, recorded ids: descriptors, of stock's", of_stock, "<= 1")
    yield _bar(
        "staged, recorded, >= 2 pages a run on the prefill: of stock's time", of_time, "<= 0.5"
    )
    # Without threads NIXL moves the bytes there while it posts; what `read` measures has
    # conversions in between.
    posts = figures["device"] == "host memory" and not figures["scenario"]["nixl_threads"]
    in_dram = figures["rows"] if posts else []
    slower = []
    for stock in (row for row in in_dram if row["arm"] == "stock"):
        reads = [
            row["post"]["median"]
            for row in in_dram
            if row["arm"] != "stock"
            and (row["pattern"], row["blocks"]) == (stock["pattern"], stock["blocks"])
        ]
        slower += [min(reads) / stock["post"]["median"]] if reads else []
    yield _bar("host memory: READs, of stock's time, the slowest pattern", slower, "<= 1")


def _recorded(rows: list[dict[str, Any]]) -> tuple[list[float], list[float]]:
    """Staged over stock, on recorded ids: (descriptors, time where the prefill's runs are long)."""
    descriptors, seconds = [], []
    for row in rows:
        if row["arm"] != "staged" or not row["pattern"].startswith("recorded"):
            continue
        for stock in _rows(rows, "stock", row["pattern"], row["blocks"]):
            descriptors.append(row["descriptors"]["merged"] / stock["descriptors"]["merged"])
            if row["pages_per_remote_run"] >= 2:
                seconds.append(row["total"]["median"] / stock["total"]["median"])
    return descriptors, seconds


def _rows(
    rows: list[dict[str, Any]], arm: str, pattern: str | None, blocks: int
) -> list[dict[str, Any]]:
    return [
        row
        for row in rows
        if row["arm"] == arm and row["blocks"] == blocks and pattern in (None, row["pattern"])
    ]


def _over(
    rows: list[dict[str, Any]], above: str, below: str, pattern: str, blocks: int
) -> list[float]:
    """Median total of one arm as a multiple of another's."""
    return [
        a["total"]["median"] / b["total"]["median"]
        for a in _rows(rows, above, pattern, blocks)
        for b in _rows(rows, below, pattern, blocks)
    ]


def _block_bytes(figures: Figures) -> float:
    row = figures["rows"][0]
    return float(row["bytes"]) / float(row["blocks"])


def _bar(name: str, found: list[float], bar: str) -> Bar:
    """The worst of what was found, against "<= n" or ">= n"."""
    relation, limit = bar.split()
    if not found:
        return name, None, bar, False
    value = max(found) if relation == "<=" else min(found)
    return name, value, bar, value <= float(limit) if relation == "<=" else value >= float(limit)
