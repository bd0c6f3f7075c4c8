"""How a result is printed, on one that is written down."""

from __future__ import annotations

from typing import Any

from tests.gpu import report

# Three hand-overs: milliseconds in the engine's thread, starting, polling, and how many polls.
SPENT = ((0.5, 0.2, 0.3, 4), (0.9, 0.3, 0.6, 7), (0.7, 0.1, 0.6, 5))


def hand_overs() -> list[dict[str, Any]]:
    return [
        {
            "hand_over_seconds": 2e-3,
            "thread_seconds": thread / 1e3,
            "start_seconds": start / 1e3,
            "poll_seconds": polls / 1e3,
            "num_polls": num_polls,
            "ready": None,
            "metrics": {"vllm:nixl_num_descriptors_sum": 256.0},
        }
        for thread, start, polls, num_polls in SPENT
    ]


def result(rows: list[dict[str, Any]]) -> dict[str, Any]:
    latencies = {key: [1.0] for key in ("worst", "extra", "converting", "first_token")}
    answer = {"right_tokens": True, "pages": 72, "right_pages": 72}
    arm = {
        "checked": {"one_by_one": [answer], "together": []},
        "measured": [
            {
                "hand_overs": rows,
                "arrivals": [{"base": 1.0, **latencies}],
                "back_to_back": [{"busy": 2.0}],
                "burst_seconds": [0.01],
            }
        ],
    }
    return {
        "num_gpus": 0,
        "device": {"torch": "1", "triton": "1"},
        "vllm": "1",
        "arms": {"an arm": arm, "a wrong one": {"checked": arm["checked"]}},
        "faults": [],
    }


def table(text: str, title: str) -> dict[str, dict[str, str]]:
    """The first table that has a column of this title: cells by arm and column."""
    lines = text.splitlines()
    first = next(i for i, line in enumerate(lines) if f"| {title} |" in line)
    end = next(i for i in range(first, len(lines)) if not lines[i])
    titles, _, *rows = (
        [cell.strip() for cell in line.split("|")[1:-1]] for line in lines[first:end]
    )
    return {row[0]: dict(zip(titles, row, strict=True)) for row in rows}


def test_the_threads_time_is_told_by_its_parts() -> None:
    arms = table(report.text(result(hand_overs())), "polls")
    cells = arms["an arm"]
    assert cells["of it in the engine's thread"] == "0.70 (0.50-0.90)"
    assert cells["starting"] == "0.20 (0.10-0.30)"
    assert cells["polling"] == "0.60 (0.30-0.60)"
    assert cells["polls"] == "5 (4-7)"
    assert cells["descriptors"] == "256-256"
    assert arms["a wrong one"]["polls"] == arms["a wrong one"]["descriptors"] == "-"
