"""The figures as a picture; matplotlib, no GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvpd.cli.bench_figures import load_pyplot


def draw(figures: dict[str, Any], path: Path) -> None:
    """One bar per row: the share of the copy's speed that the conversion reached.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    pyplot = load_pyplot()
    rows = [row for row in figures["rows"] if row["who"] == "kvpd" and row["section"] != "sweep"]
    figure, axes = pyplot.subplots(figsize=(9, 1.5 + 0.22 * len(rows)))
    names = [
        f"{row['name']}, {row['placement']}, {row['ids']}"
        + (", reverse" if row["direction"].startswith("shuffle") else "")
        for row in rows
    ]
    shares = [row["of_copy"] for row in rows]
    low = [
        share - row["copy"]["median_us"] / row["timing"]["p90_us"]
        for row, share in zip(rows, shares, strict=True)
    ]
    high = [
        row["copy"]["median_us"] / row["timing"]["p10_us"] - share
        for row, share in zip(rows, shares, strict=True)
    ]
    colors = ["tab:blue" if row["placement"] == "in-place" else "tab:green" for row in rows]
    spread = [[max(0.0, value) for value in side] for side in (low, high)]
    axes.barh(range(len(rows)), shares, xerr=spread, color=colors, height=0.7)
    axes.set_yticks(range(len(rows)), names, fontsize=7)
    axes.invert_yaxis()
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xlim(0, max(1.05, *shares) if shares else 1.05)
    axes.set_xlabel("speed as a share of copying the same bytes (median; p10 and p90)")
    axes.set_title(
        f"{figures['device']}, torch {figures['torch']}, triton {figures['triton']}", fontsize=9
    )
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
