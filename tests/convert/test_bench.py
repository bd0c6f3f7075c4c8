"""`kvpd bench convert`: its baselines convert right, its report reads figures as they are."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kvpd.cli import bench_convert
from kvpd.cli.convert_bench import report
from kvpd.cli.convert_bench.baselines import torch_operations
from kvpd.cli.convert_bench.workloads import Shape, make_cache, make_ids
from kvpd.convert import prepare


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_baseline_of_torch_operations_is_right(dtype: str) -> None:
    """A baseline that did less than the work would make a fine figure."""
    shape = Shape("small", 2, 3, 16, 64, dtype)
    standard, shuffled = shape.formats()
    cache = make_cache(shuffled, shape.layers, 9, 2, torch.device("cpu"))
    ids = make_ids("random", 5, 9, torch.device("cpu"))
    before = cache.memory.clone()
    prepare(cache.pages.seen_as(standard), cache.pages, implementation="reference")(ids, ids)
    expected = cache.memory.clone()
    cache.memory.copy_(before)
    torch_operations(shape, cache.pages, ids)
    assert torch.equal(cache.memory, expected) and not torch.equal(before, expected)


@pytest.mark.parametrize("kind", ["random", "sorted", "contiguous"])
def test_ids(kind: Any) -> None:
    ids = make_ids(kind, 20, 50, torch.device("cpu")).tolist()
    assert len(set(ids)) == 20 and min(ids) >= 0 and max(ids) < 50
    assert (ids == sorted(ids)) == (kind != "random")
    assert (ids == list(range(ids[0], ids[0] + 20))) == (kind == "contiguous")


def timing(us: float) -> dict[str, float]:
    return {"median_us": us, "p10_us": us, "p90_us": us}


def row(name: str, us: float, **changes: Any) -> dict[str, Any]:
    values = {
        "section": "main",
        "name": name,
        "who": "kvpd",
        "placement": "in-place",
        "ids": "random",
        "direction": "standard -> shuffle",
        "bytes": 600_000_000,
        "timing": timing(us),
        "copy": timing(90),
        "terabytes_per_s": 1.0,
        "of_copy": 90 / us,
        "right": True,
        "tuning": None,
    }
    return {**values, **changes}


def figures(*rows: dict[str, Any], launch: tuple[dict[str, Any], ...] = ()) -> dict[str, Any]:
    facts = dict.fromkeys(("device", "torch", "triton", "kvpd", "writer"), "?")
    return {**facts, "repeat": 1, "shrink": 1, "rows": list(rows), "launch": list(launch)}


def test_bars() -> None:
    data = figures(
        row("Qwen3-8B 4k", 100),
        row("Qwen3-8B 4k", 799, who="torch"),
        row("Qwen3-8B 4k", 95, placement="staged"),
        row("odd", 120, section="shapes"),
        row("small", 900, section="shapes", bytes=1000),
        row("swept", 900, section="sweep"),
    )
    found = {name: (value, ok) for name, value, _, ok in report.bars(data)}
    assert found["Qwen3-8B 4k, in-place, random ids, of the copy"] == (0.9, True)
    staged, holds = found["Qwen3-8B 4k, staged, random ids, of the copy"]
    assert staged == pytest.approx(0.947, abs=1e-3) and holds
    assert found["Qwen3-8B 16k, staged, random ids, of the copy"] == (None, False)
    assert found["worst shape of 150 MB or more, of the copy"] == (0.75, False)
    assert found["Qwen3-8B 4k: times faster than torch"] == (7.99, False)
    assert found["1 block: times faster than torch"] == (None, False)
    assert not report.holds(data)
    assert report.holds(figures(row("Qwen3-8B 4k", 100)))
    assert not report.holds(figures(row("Qwen3-8B 4k", 100, right=False)))


def test_table_from_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    launch = {
        "blocks": 1,
        "who": "kvpd",
        "until_done": timing(9),
        "gpu": timing(7),
        "host": timing(61),
    }
    path = tmp_path / "figures.json"
    path.write_text(json.dumps(figures(row("Qwen3-8B 4k", 100), launch=(launch,))))
    parser = argparse.ArgumentParser()
    bench_convert.add_arguments(parser)
    assert bench_convert.run(parser.parse_args(["--from-json", str(path)])) == 1
    text = capsys.readouterr().out
    assert "0.900  right" in text
    assert "us on the host" in text and "MISSED" in text and "not measured" in text


def test_unknown_section(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    bench_convert.add_arguments(parser)
    assert bench_convert.run(parser.parse_args(["--sections", "main,mian"])) == 2
    assert "mian" in capsys.readouterr().err
