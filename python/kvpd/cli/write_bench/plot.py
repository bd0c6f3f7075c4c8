"""The figures as a picture; matplotlib, no GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvpd.cli.bench_figures import load_pyplot
from kvpd.cli.write_bench.report import JOB_NAMES, pairs


def draw(figures: dict[str, Any], path: Path) -> None:
    """Time by number of tokens, a panel per job; shuffled pages.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    pyplot = load_pyplot()
    figure, panels = pyplot.subplots(1, len(JOB_NAMES), figsize=(13, 4.2), sharey=True)
    lines = {"decode": "-", "chunk": "--"}
    for axes, (job, title) in zip(panels, JOB_NAMES.items(), strict=True):
        for order, style in lines.items():
            rows = [
                (row, other)
                for row, other in pairs(figures)
                if (row["section"], row["job"], row["order"]) == ("main", job, order)
            ]
            kinds = (("kvpd", "tab:blue", 0), ("separate kernels", "tab:gray", 1))
            for label, color, side in kinds:
                found = [row for pair in rows if (row := pair[side]) is not None]
                points = [(row["tokens"], row["timing"]["median_us"]) for row in found]
                axes.plot(
                    [tokens for tokens, _ in points],
                    [us for _, us in points],
                    style,
                    color=color,
                    marker=".",
                    label=f"{label}, {order}",
                )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("tokens")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("us, all layers, in one CUDA graph")
    panels[0].legend(fontsize=8)
    figure.suptitle(
        f"{figures['device']}, torch {figures['torch']}, triton {figures['triton']}", fontsize=9
    )
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
