"""A result of serve.py as tables: python -m tests.gpu.report FILE"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

Result = dict[str, Any]


def text(result: Result) -> str:
    """Everything in a form to read."""
    device, places = result["device"], {0: "CPU", 1: "1 x", 2: "2 x"}
    lines = [
        f"{places[result['num_gpus']]} {device.get('name', '')}, vLLM {result['vllm']}, "
        f"torch {device['torch']}, triton {device['triton']}",
        "",
        "| arm | right tokens | pages as they must be | transfer ms | conversion ms | hand-over ms "
        "| of it in the engine's thread | starting | polling | polls | descriptors |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    measured = {}
    for name, arm in result["arms"].items():
        if "error" in arm:
            lines.append(f"| {name} | {arm['error'].splitlines()[0]} |")
            continue
        cells = [name, *_right(arm)]
        if arm.get("measured"):
            measured[name] = _merged(arm["measured"])
            cells += _hand_over(measured[name]["hand_overs"])
        cells += ["-"] * (11 - len(cells))
        lines.append("| " + " | ".join(cells) + " |")
    lines += [
        "",
        "| arm | ms a token, nothing arrives | arrivals one upon the other "
        "| worst gap an arrival | delay an arrival "
        "| of it in the two gaps after the conversion's start "
        "| the arrival's first token | first tokens of a burst |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, values in measured.items():
        lines.append("| " + " | ".join([name, *_latency(values)]) + " |")
    return "\n".join([*lines, "", *(result["faults"] or ["everything was as it has to be"])])


def _merged(passes: list[dict[str, Any]]) -> dict[str, Any]:
    """The lists of all passes, one after the other."""
    names = ("hand_overs", "arrivals", "back_to_back", "burst_seconds")
    return {name: [value for each in passes for value in each[name]] for name in names}


def _right(arm: dict[str, Any]) -> list[str]:
    one_by_one, together = arm["checked"]["one_by_one"], arm["checked"]["together"]
    answers = one_by_one + together
    right = sum(answer["right_tokens"] for answer in one_by_one)
    pages = sum(answer["pages"] for answer in answers)
    return [
        f"{right} of {len(one_by_one)}",
        f"{sum(answer['right_pages'] for answer in answers)} of {pages}",
    ]


def _hand_over(rows: list[dict[str, Any]]) -> list[str]:
    def grown(*names: str) -> list[float]:
        return [
            1e3 * sum(row["metrics"].get(f"vllm:{name}_seconds_sum", 0.0) for name in names)
            for row in rows
        ]

    ready = [row["ready"] for row in rows if row["ready"]]
    if ready:
        transfer, conversion = _spread(grown("kvpd_read")), _spread(grown("kvpd_convert"))
        descriptors = [answer["descriptors"]["merged"] for answer in ready]
    else:
        transfer, conversion = _spread(grown("nixl_xfer_time")), "-"
        descriptors = [row["metrics"].get("vllm:nixl_num_descriptors_sum", 0) for row in rows]
    return [
        transfer,
        conversion,
        _spread([1e3 * row["hand_over_seconds"] for row in rows]),
        _spread([1e3 * row["thread_seconds"] for row in rows]),
        *(_spread([1e3 * row[key] for row in rows]) for key in ("start_seconds", "poll_seconds")),
        _spread([row["num_polls"] for row in rows], digits=0),
        f"{min(descriptors):,.0f}-{max(descriptors):,.0f}" if max(descriptors) else "none",
    ]


def _latency(measured: dict[str, Any]) -> list[str]:
    rounds = measured["arrivals"]

    def all_of(key: str) -> list[float]:
        return [value for each in rounds for value in each[key]]

    burst = [1e3 * value for value in measured["burst_seconds"]]
    return [
        f"{median(each['base'] for each in rounds):.2f}",
        f"{median(each['busy'] for each in measured['back_to_back']):.2f}",
        *(_spread(all_of(key)) for key in ("worst", "extra", "converting", "first_token")),
        _spread(burst),
    ]


def _spread(values: list[float], *, digits: int = 2) -> str:
    """Median, and the range it came from."""
    if not values:
        return "-"
    return f"{median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


if __name__ == "__main__":
    print(text(json.loads(Path(sys.argv[1]).read_text())))
