"""`kvpd bench write`: its contestants do the work, its report reads figures as they are."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvpd.cli import bench_write
from kvpd.cli.write_bench import report
from kvpd.cli.write_bench.contestants import JOBS, Engines, kvpd, separate
from kvpd.cli.write_bench.suite import _bits, _restore, _state
from kvpd.cli.write_bench.workloads import Order, Shape, Workload, make_workload
from tests.convert.interpreter import interpreting
from tests.convert.test_real_writers import VLLM
from tests.write.interpreter import rounding

SMALL = Shape("small", 2, 4, 2, 16, 64)


def after(workload: Workload, work: Any) -> list[torch.Tensor]:
    """Everything that a job may write, as it is after it; the workload is as before again."""
    before = [tensor.clone() for tensor in _state(workload)]
    work()
    found = [_bits(tensor.clone()) for tensor in _state(workload)]
    _restore(workload, before)
    return found


@pytest.mark.parametrize("order, num_tokens", [("decode", 3), ("chunk", 20)])
@pytest.mark.parametrize("job", JOBS)
def test_kvpd_is_timed_at_the_whole_job(job: str, order: Order, num_tokens: int) -> None:
    workload = make_workload(SMALL, num_tokens, order, torch.device("cpu"))
    with rounding():
        ours = after(workload, kvpd(workload, job))
    expected = after(workload, kvpd(workload, job, implementation="reference"))
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))
    changed = [not torch.equal(a, _bits(b)) for a, b in zip(ours, _state(workload), strict=True)]
    assert changed == [True] + [job == "rope", job == "norm", job == "norm"] * SMALL.layers


def test_vllms_writer_is_given_what_kvpd_is() -> None:
    """The baseline writes the same bytes: nothing less, nowhere else."""
    if not VLLM.is_file():
        pytest.skip("VLLM'S WRITER WAS NOT COMPARED: no target/writers, make gets it")
    workload = make_workload(SMALL, 40, "chunk", torch.device("cpu"))
    with interpreting():
        theirs = separate(workload, "write", Engines(VLLM, None))
    assert theirs is not None
    with rounding():
        ours = after(workload, kvpd(workload, "write"))
        expected = after(workload, theirs)
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


def test_other_pages_have_no_such_baseline() -> None:
    packed = make_workload(replace(SMALL, family="packed"), 3, "decode", torch.device("cpu"))
    assert separate(packed, "write", Engines(VLLM, None)) is None


def row(us: float, **changes: Any) -> dict[str, Any]:
    values = {
        "section": "main",
        "name": "Qwen3-8B",
        "order": "decode",
        "tokens": 1,
        "job": "rope",
        "who": "kvpd",
        "layers": 36,
        "timing": {"median_us": us, "p10_us": us, "p90_us": us},
        "right": True,
        "tuning": None,
    }
    return {**values, **changes}


def figures(*rows: dict[str, Any]) -> dict[str, Any]:
    facts = dict.fromkeys(("device", "torch", "triton", "kvpd"), "?")
    host = {"job": "rope", "who": "kvpd", "timing": {"median_us": 41.0}}
    return {**facts, "repeat": 1, "missing": {"AITER": "gone"}, "rows": list(rows), "host": [host]}


def test_bars() -> None:
    data = figures(
        row(50),
        row(150, who="vLLM", right=None),
        row(100, tokens=64),
        row(190, tokens=64, who="vLLM", right=None),
        row(1, tokens=128),
        row(1, tokens=128, who="vLLM", right=None),
        row(100, tokens=2048, order="chunk"),
        row(151, tokens=2048, order="chunk", who="vLLM", right=None),
    )
    found = [(value, ok) for _, value, _, ok in report.bars(data)]
    assert found == [(1.9, False), (1.51, True), (None, False)]
    assert not report.holds(data)
    assert report.holds(figures(row(50), row(150, who="vLLM", right=None)))
    assert not report.holds(figures(row(50, right=False)))


def test_table_and_plot_from_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, picture = tmp_path / "figures.json", tmp_path / "figures.png"
    path.write_text(json.dumps(figures(row(50), row(150, who="vLLM", right=None))))
    parser = argparse.ArgumentParser()
    bench_write.add_arguments(parser)
    arguments = ["--from-json", str(path), "--plot", str(picture)]
    assert bench_write.run(parser.parse_args(arguments)) == 0
    text = capsys.readouterr().out
    assert "vLLM 150.0   3.00  right" in text and "not measured: AITER: gone" in text
    assert picture.stat().st_size > 1000


def test_unknown_section(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    bench_write.add_arguments(parser)
    assert bench_write.run(parser.parse_args(["--sections", "main,mian"])) == 2
    assert "mian" in capsys.readouterr().err
