"""Figures as a table, and the bars they are held to. Needs nothing but the figures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Figures = dict[str, Any]
_LARGE_BYTES = 150_000_000


def text(figures: Figures) -> str:
    """Everything in a form to read."""
    lines = [
        f"{figures['device']}, torch {figures['torch']}, triton {figures['triton']}, "
        f"kvpd {figures['kvpd']}, {figures['repeat']} rounds; medians (p10-p90), 2x bytes counted",
        f"writer: {figures['writer']}",
        "",
        f"{'cache':24}{'who':8}{'placement':10}{'ids':12}{'direction':21}{'MB':>7}"
        f"{'us':>10}{'p10-p90':>18}{'TB/s':>7}{'copy us':>10}{'of copy':>9}  bytes",
    ]
    for row in figures["rows"]:
        timing = row["timing"]
        spread = f"{timing['p10_us']:.1f}-{timing['p90_us']:.1f}"
        tuning = row["tuning"]
        lines.append(
            f"{row['name']:24}{row['who']:8}{row['placement']:10}{row['ids']:12}"
            f"{row['direction']:21}{row['bytes'] / 1e6:7.0f}{timing['median_us']:10.1f}"
            f"{spread:>18}{row['terabytes_per_s']:7.2f}{row['copy']['median_us']:10.1f}"
            f"{row['of_copy']:9.3f}  {'right' if row['right'] else 'WRONG'}"
            + ("" if tuning is None else "  " + _tuning(tuning))
        )
    if figures["launch"]:
        lines += ["", f"{'blocks':>7} {'who':8}{'until done':>16}{'GPU alone':>12}{'host':>10}"]
    for row in figures["launch"]:
        alone = f"{row['gpu']['median_us']:9.1f} us" if row["gpu"] is not None else f"{'-':>12}"
        lines.append(
            f"{row['blocks']:7} {row['who']:8}{row['until_done']['median_us']:13.1f} us{alone}"
            f"{row['host']['median_us']:7.1f} us"
        )
    lines += ["", "bars"]
    for name, value, bar, holds in bars(figures):
        verdict = "not measured" if value is None else "holds" if holds else "MISSED"
        shown = "-" if value is None else f"{value:.3g}"
        lines.append(f"  {name:58}{shown:>8}  {bar:12}{verdict}")
    return "\n".join(lines)


def holds(figures: Figures) -> bool:
    """Whether all bytes were right and no measured bar was missed."""
    right = all(row["right"] for row in figures["rows"])
    return right and all(ok for _, value, _, ok in bars(figures) if value is not None)


def bars(figures: Figures) -> Iterator[tuple[str, float | None, str, bool]]:
    """(what, value or None if not measured, the bar, whether it holds)."""
    rows = [row for row in figures["rows"] if row["section"] in ("main", "shapes")]
    ours = [row for row in rows if row["who"] == "kvpd"]
    for size in ("4k", "16k"):
        of_size = [row for row in ours if row["name"] == f"Qwen3-8B {size}"]
        forth = [row for row in of_size if row["direction"].startswith("standard")]
        for placement, ids, bar in (
            ("in-place", "random", 0.90),
            ("staged", "random", 0.93),
            ("in-place", "contiguous", 0.94),
        ):
            found = [
                row["of_copy"]
                for row in forth
                if row["placement"] == placement and row["ids"] == ids
            ]
            yield _at_least(f"Qwen3-8B {size}, {placement}, {ids} ids, of the copy", found, bar)
    large = [row["of_copy"] for row in ours if row["bytes"] >= _LARGE_BYTES]
    yield _at_least("worst shape of 150 MB or more, of the copy", large, 0.85)
    for who in ("torch", "writer"):
        found = [
            row["timing"]["median_us"] / mine["timing"]["median_us"]
            for row in rows
            for mine in ours
            if row["who"] == who and _same_work(row, mine)
        ]
        yield _at_least(f"Qwen3-8B 4k: times faster than {who}", found, 8)
    one = {row["who"]: row for row in figures["launch"] if row["blocks"] == 1}
    for who in ("torch", "writer"):
        found = (
            [one[who]["until_done"]["median_us"] / one["kvpd"]["until_done"]["median_us"]]
            if who in one
            else []
        )
        yield _at_least(f"1 block: times faster than {who}", found, 50)
    for field, name, bar in (("gpu", "GPU", 10.0), ("host", "host", 60.0)):
        value = one["kvpd"][field]["median_us"] if one else None
        ok = value is not None and value <= bar
        yield f"1 block x 36 layers: us on the {name}", value, f"<= {bar:g}", ok


def _at_least(name: str, found: list[float], bar: float) -> tuple[str, float | None, str, bool]:
    value = min(found) if found else None
    return name, value, f">= {bar:g}", value is not None and value >= bar


def _same_work(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return all(a[key] == b[key] for key in ("section", "name", "placement", "ids", "direction"))


def _tuning(tuning: dict[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in tuning.items() if value is not None)
