"""The figures as a picture; matplotlib, no GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvpd.cli.bench_figures import load_pyplot

_COLORS = {"stock": "tab:gray", "half": "tab:red", "staged": "tab:green", "direct": "tab:blue"}


def draw(figures: dict[str, Any], path: Path) -> None:
    """One group of bars for each workload: the time of every arm, on a logarithmic axis.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    pyplot = load_pyplot()
    rows = figures["rows"]
    figure, axes = pyplot.subplots(figsize=(9, 1.5 + 0.25 * len(rows)))
    position, places, names = 0.0, [], []
    last = None
    for row in rows:
        workload = (row["pattern"], row["blocks"])
        position += 1.0 if workload == last else 1.6
        last = workload
        total = row["total"]
        low, high = (
            1e3 * total["median"] - 1e3 * total["p10"],
            1e3 * (total["p90"] - total["median"]),
        )
        axes.barh(
            position,
            1e3 * total["median"],
            xerr=[[low], [high]],
            color=_COLORS.get(row["arm"], "tab:purple"),
            height=0.8,
        )
        axes.text(
            1e3 * total["p90"],
            position,
            f"  {row['gigabytes_per_s']:.3g} GB/s",
            fontsize=6,
            va="center",
        )
        places.append(position)
        names.append(f"{row['pattern']}, {row['blocks']} blocks, {row['arm']}")
    axes.set_yticks(places, names, fontsize=7)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("ms until all pages are ready (median; p10 and p90)")
    link = "" if figures["has_link"] else ", no link"
    axes.set_title(
        f"{figures['device']}{link}, torch {figures['torch']}, NIXL {figures['nixl']}", fontsize=9
    )
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
