"""Figures as a table, and the bars they are held to. Needs nothing but the figures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Figures = dict[str, Any]
JOB_NAMES = {
    "write": "KV write",
    "rope": "RoPE + write",
    "norm": "QK norm + RoPE + write",
}


def text(figures: Figures) -> str:
    """Everything in a form to read."""
    lines = [
        f"{figures['device']}, torch {figures['torch']}, triton {figures['triton']}, "
        f"kvpd {figures['kvpd']}, {figures['repeat']} rounds; us of all layers in one CUDA graph, "
        "medians (p10-p90)",
    ]
    lines += [f"not measured: {what}: {why}" for what, why in figures["missing"].items()]
    lines += [
        "",
        f"{'pages':14}{'batch':8}{'tokens':>7}  {'job':24}{'kvpd':>9}{'p10-p90':>18}"
        f"{'others':>16}{'times':>7}  bits",
    ]
    for row, other in pairs(figures):
        timing = row["timing"]
        spread = f"{timing['p10_us']:.1f}-{timing['p90_us']:.1f}"
        against = "-" if other is None else f"{other['who']} {other['timing']['median_us']:.1f}"
        times = "" if other is None else f"{_times(row, other):.2f}"
        right = {True: "right", False: "WRONG", None: ""}[row["right"]]
        tuning = row["tuning"]
        lines.append(
            f"{row['name']:14}{row['order']:8}{row['tokens']:7}  {JOB_NAMES[row['job']]:24}"
            f"{timing['median_us']:9.1f}{spread:>18}{against:>16}{times:>7}  {right}"
            + ("" if tuning is None else "  " + " ".join(f"{k}={v}" for k, v in tuning.items()))
        )
    if figures["host"]:
        lines += ["", "one layer's call, us on the host"]
        lines += [
            f"  {JOB_NAMES[row['job']]:24}{row['who']:8}{row['timing']['median_us']:8.1f}"
            for row in figures["host"]
        ]
    lines += ["", "bars"]
    for name, value, bar, ok in bars(figures):
        verdict = "not measured" if value is None else "holds" if ok else "MISSED"
        shown = "-" if value is None else f"{value:.3g}"
        lines.append(f"  {name:58}{shown:>8}  >= {bar:<8g}{verdict}")
    return "\n".join(lines)


def holds(figures: Figures) -> bool:
    """Whether all bits were right and no measured bar was missed."""
    right = all(row["right"] is not False for row in figures["rows"])
    return right and all(ok for _, value, _, ok in bars(figures) if value is not None)


def pairs(figures: Figures) -> Iterator[tuple[dict[str, Any], dict[str, Any] | None]]:
    """kvpd's rows, each with the other kernels' row of the same work."""
    others = {_work(row): row for row in figures["rows"] if row["who"] != "kvpd"}
    for row in figures["rows"]:
        if row["who"] == "kvpd":
            yield row, others.get(_work(row))


def bars(figures: Figures) -> Iterator[tuple[str, float | None, float, bool]]:
    """(what, value or None if not measured, the bar, whether it holds)."""
    for name, job, order, tokens, bar in (
        ("RoPE + write, 1 to 64 tokens: times faster than vLLM's", "rope", "decode", (1, 64), 2.0),
        ("RoPE + write, a chunk of 2,048: the same", "rope", "chunk", (2048, 2048), 1.5),
        ("KV write, a chunk of 2,048: the same", "write", "chunk", (2048, 2048), 2.0),
    ):
        found = [
            _times(row, other)
            for row, other in pairs(figures)
            if other is not None
            and (row["section"], row["job"], row["order"]) == ("main", job, order)
            and tokens[0] <= row["tokens"] <= tokens[1]
        ]
        value = min(found) if found else None
        yield name, value, bar, value is not None and value >= bar


def _work(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[field] for field in ("section", "name", "order", "tokens", "job"))


def _times(row: dict[str, Any], other: dict[str, Any]) -> float:
    return float(other["timing"]["median_us"] / row["timing"]["median_us"])
