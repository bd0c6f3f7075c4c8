"""`kvpd bench transfer`: real processes and NIXL in host memory, bytes checked, time not."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvpd.cli import bench_transfer, main
from kvpd.cli.transfer_bench import report
from kvpd.cli.transfer_bench.cache import GUARD_BYTES, Cache
from kvpd.cli.transfer_bench.content import elements, shuffled_planes, standard_pages
from kvpd.cli.transfer_bench.fit import fit_link
from kvpd.cli.transfer_bench.patterns import Request, recorded, synthetic
from kvpd.cli.transfer_bench.scenario import Scenario
from kvpd.errors import PlanError
from kvpd.vllm.config import ConnectorConfig
from tests.oracle.pages import Spec, planes

TRACES = sorted((Path(__file__).parent / "vectors" / "block_ids").glob("*.json"))
SMALL = Scenario(3, 2, 16, 64, 40, "cpu", "cpu")


def request(local: list[int], remote: list[int]) -> Request:
    return np.array(local, dtype=np.int32), np.array(remote, dtype=np.int32)


def test_every_arm_moves_the_right_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The small run of CI: two processes, every arm that host memory has, every pattern."""
    path, trace = tmp_path / "figures.json", tmp_path / "trace.json"
    entry = {"local": [3, 2, 30, 31], "remote": [7, 6, 11, 10]}
    trace.write_text(json.dumps({"requests": [entry, {"local": [], "remote": []}]}))
    words = "bench transfer --device cpu --layers 3 --heads 2 --head-dim 64 --cache-blocks 40"
    words += f" --blocks 1,17 --repeat 2 --slab-mb 8 --explain --traces {trace} --json {path}"
    assert main(words.split()) == 0
    figures = json.loads(path.read_text())
    rows = {(row["pattern"], row["blocks"], row["arm"]): row for row in figures["rows"]}
    patterns = {("recorded trace", 4)} | {
        (pattern, blocks) for pattern in ("consecutive", "reversed", "random") for blocks in (1, 17)
    }
    assert {(pattern, blocks) for pattern, blocks, _ in rows} == patterns
    assert {arm for _, _, arm in rows} == {"stock", "half", "staged"}
    assert list(figures["not_run"]) == ["direct"] and figures["prefill_unchanged"]
    for row in rows.values():
        assert row["right"]
        assert row["bytes"] == row["blocks"] * SMALL.block_bytes
        # What the plan predicts is what NIXL counts.
        assert row["descriptors"]["counted"] == row["descriptors"]["merged"], row
    # Three layers: one descriptor each, one for every page, and for every half page.
    found = {arm: rows["reversed", 17, arm]["descriptors"]["merged"] for arm in figures_arms(rows)}
    assert found == {"stock": 51, "staged": 3, "half": 102}
    text = capsys.readouterr().out
    assert "NO LINK IS MEASURED" in text and "chosen: staged" in text and "WRONG" not in text


def figures_arms(rows: dict[tuple[str, int, str], Any]) -> set[str]:
    return {arm for _, _, arm in rows}


def test_the_oracle_agrees_with_the_other_one() -> None:
    """Pages from reshapes in torch, against the test oracle's reshapes in numpy."""
    blocks = torch.tensor([0, 7, 39])
    values = elements(SMALL, 2, blocks).numpy()
    spec = Spec("aiter-shuffle", "tiled", SMALL.heads, SMALL.tokens, SMALL.head_dim, "bfloat16")
    k_plane, v_plane = shuffled_planes(SMALL, 2, blocks)
    for at in range(len(blocks)):
        k, v = (values[at, :, part].transpose(1, 0, 2) for part in (0, 1))
        for plane, expected in zip((k_plane, v_plane), planes(spec, k, v), strict=True):
            assert plane[at].numpy().tobytes() == expected.tobytes()
        page = np.concatenate([k, v], axis=2)
        assert standard_pages(SMALL, 2, blocks)[at].numpy().tobytes() == page.tobytes()


def test_elements_tell_their_places_apart() -> None:
    everywhere = torch.arange(SMALL.num_blocks)
    pages = torch.cat([standard_pages(SMALL, layer, everywhere) for layer in range(3)])
    assert len({page.numpy().tobytes() for page in pages}) == 3 * SMALL.num_blocks
    lines = pages.view(-1, 16)
    assert len({line.numpy().tobytes() for line in lines}) == len(lines)


@pytest.mark.parametrize("converted", [True, False])
def test_the_check_finds_one_wrong_byte(converted: bool) -> None:
    """In a page, in a block that nobody asked for, in a guard, and in pages that changed places."""
    moved = request([4, 9], [8, 1])

    def filled() -> Cache:
        cache = Cache(SMALL, "cpu")
        s = SMALL
        for layer in range(s.layers):
            theirs = torch.from_numpy(moved[1]).long()
            if converted:
                planes = cache.inner.view(s.layers, 2, s.num_blocks, -1)[layer]
                for plane, values in zip(planes, shuffled_planes(s, layer, theirs), strict=True):
                    plane[moved[0]] = values
            else:
                pages = cache.inner.view(s.layers, s.num_blocks, -1)[layer]
                pages[moved[0]] = standard_pages(s, layer, theirs)
        return cache

    assert filled().holds_exactly([moved], converted=converted)
    assert not filled().holds_exactly([moved], converted=not converted)
    assert not filled().holds_exactly([request([9, 4], [8, 1])], converted=converted)
    block = GUARD_BYTES + 4 * SMALL.page_bytes // (2 if converted else 1)
    unused = block + SMALL.page_bytes
    for at in (0, GUARD_BYTES - 1, block + 5, unused, len(filled().memory) - 1):
        cache = filled()
        cache.memory[at] ^= 1
        assert not cache.holds_exactly([moved], converted=converted), at


def test_a_prefill_that_changed_is_found() -> None:
    cache = Cache(SMALL, "cpu")
    cache.write_prefill()
    assert cache.is_prefill()
    cache.inner[-1] ^= 1
    assert not cache.is_prefill()


def test_patterns() -> None:
    for pattern, expected in (("consecutive", (17, 17)), ("reversed", (17, 17))):
        assert synthetic(pattern, 17, 40).pages_per_run == expected
    local, remote = synthetic("random", 17, 40).requests[0]
    assert len(set(local.tolist())) == len(set(remote.tolist())) == 17
    assert synthetic("reversed", 3, 9).requests[0][1].tolist() == [2, 1, 0]
    for pattern, count in (("random", 41), ("sorted", 3)):
        with pytest.raises(PlanError):
            synthetic(pattern, count, 40)


@pytest.mark.parametrize(
    "content",
    ["", "[]", '{"requests": 3}', '{"requests": [{"local": ["a"], "remote": [1]}]}',
     '{"requests": [{"local": [1], "remote": [40]}]}'],
)  # fmt: skip
def test_files_that_are_no_traces(tmp_path: Path, content: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(content)
    with pytest.raises(PlanError):
        list(recorded([path], 40, 8))


def figures(*rows: dict[str, Any], **changes: Any) -> dict[str, Any]:
    facts = {"device": "a GPU", "torch": "?", "nixl": "?", "kvpd": "?", "repeat": 1}
    return {
        **facts,
        "scenario": SMALL.to_json(),
        "has_link": True,
        "slab_bytes": 1,
        "num_slots": 1,
        "not_run": {},
        "rows": list(rows),
        "victims": [],
        "link": None,
        "prefill_unchanged": True,
        **changes,
    }


def row(arm: str, pattern: str, blocks: int, ms: float, **changes: Any) -> dict[str, Any]:
    spread = {"median": ms * 1e-3, "p10": ms * 1e-3, "p90": ms * 1e-3}
    values = {
        "arm": arm,
        "pattern": pattern,
        "requests": 1,
        "blocks": blocks,
        "bytes": blocks * 2_359_296,
        "pages_per_run": 1.0,
        "pages_per_remote_run": 1.0,
        **dict.fromkeys(("total", "read", "convert", "post"), spread),
        "gigabytes_per_s": blocks * 2_359_296 / (ms * 1e6),
        "descriptors": {"planned": 36 * blocks, "merged": 36 * blocks, "counted": None},
        "predicted": None,
        "explained": "",
        "right": True,
    }
    return {**values, **changes}


def test_bars() -> None:
    recorded_rows = [
        row("stock", "recorded a", 100, 10.0),
        row(
            "staged",
            "recorded a",
            100,
            6.0,
            pages_per_remote_run=2.5,
            descriptors={"planned": 3600, "merged": 1800, "counted": 1800},
        ),
        # Short runs on the prefill: held to the descriptors only.
        row("stock", "recorded b", 50, 1.0),
        row("staged", "recorded b", 50, 9.0),
    ]
    data = figures(
        row("stock", "random", 256, 30.0),
        row("staged", "random", 256, 33.0),
        row("direct", "random", 256, 1.65),
        row("direct", "consecutive", 1, 0.058),
        *recorded_rows,
        victims=[
            {"victim": "bandwidth-bound", "arm": "direct", "blocks": 256, "slowdown": 0.8e-3,
             "slowdown_p10": 0.0, "slowdown_p90": 0.0, "alone": 0.1, "transfer": 0.1},
        ],
    )  # fmt: skip
    found: dict[str, Any] = {name: (value, holds) for name, value, _, holds in report.bars(data)}
    speed, holds = found["direct, random ids, 4k: GB/s"]
    assert speed == pytest.approx(366.05, abs=0.01) and holds
    assert found["direct, random ids, 16k: GB/s"] == (None, False)
    assert found["direct, random ids, 4k: times faster than stock"][1]
    assert found["direct, 1 block x all layers: us until done"] == (pytest.approx(58), True)
    added = found["direct: ms added to the bandwidth-bound victim per 0.6 GB"]
    assert added == (pytest.approx(0.8, rel=1e-3), False)
    assert found["staged, random ids, 4k: of stock's time"] == (pytest.approx(1.1), False)
    assert found["staged, consecutive ids, 4k: of stock's time"] == (None, False)
    assert found["staged, recorded ids: descriptors, of stock's"] == (1.0, True)
    name = "staged, recorded, >= 2 pages a run on the prefill: of stock's time"
    assert found[name] == (pytest.approx(0.6), False)
    assert found["host memory: READs, of stock's time, the slowest pattern"][0] is None
    for nixl_threads, slowest in ((4, None), (0, pytest.approx(9.0))):
        scenario = replace(SMALL, nixl_threads=nixl_threads).to_json()
        changes = {"has_link": False, "device": "host memory", "scenario": scenario}
        without_link = figures(*data["rows"], **changes)
        found = {name: (value, holds) for name, value, _, holds in report.bars(without_link)}
        assert found["direct, random ids, 4k: GB/s"] == (None, False)
        name = "host memory: READs, of stock's time, the slowest pattern"
        assert found[name] == (slowest, False)


def test_the_link_is_fitted() -> None:
    """Times made from known numbers give them back; too few rows give nothing."""

    def made(arm: str, blocks: int, merged: int) -> dict[str, Any]:
        seconds = 2e-5 + merged * 3.5e-6 + blocks * 2_359_296 / 280e9
        descriptors = {"planned": 36 * blocks, "merged": merged, "counted": merged}
        return row(arm, "any", blocks, 1e3 * seconds, descriptors=descriptors)

    rows = [made("stock", 1, 36), made("stock", 256, 36), made("stock", 256, 9216)]
    rows += [made("half", 1, 72), row("staged", "any", 256, 1e9)]
    assert fit_link(rows) == pytest.approx(
        {"bytes_per_second": 280e9, "seconds_per_descriptor": 3.5e-6, "seconds_per_chunk": 2e-5}
    )
    assert fit_link(rows[:3]) is None


def test_the_link_is_shown_as_the_key_takes_it() -> None:
    """Only of a link: what host memory gives would mislead a planner."""
    rates = {"bytes_per_second": 264e9, "seconds_per_descriptor": 3.5e-6, "seconds_per_chunk": 1e-5}
    shown = report.text(figures(row("stock", "random", 256, 1.0), link=rates))
    (line,) = (line for line in shown.splitlines() if '"link"' in line)
    key = json.loads("{" + line[line.index('"link"') :] + "}")
    assert ConnectorConfig.of(key).link == rates
    memory = report.text(figures(row("stock", "random", 256, 1.0), link=rates, has_link=False))
    assert '"link"' not in memory


def test_exit_status_is_about_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slow, wrong = row("stock", "random", 256, 1e6), row("staged", "random", 256, 1, right=False)
    parser = argparse.ArgumentParser()
    bench_transfer.add_arguments(parser)
    for data, status in (
        (figures(slow), 0),
        (figures(slow, wrong), 1),
        (figures(slow, prefill_unchanged=False), 1),
        (figures(), 1),
    ):
        path = tmp_path / "figures.json"
        path.write_text(json.dumps(data))
        assert bench_transfer.run(parser.parse_args(["--from-json", str(path)])) == status
    assert "WRONG" in capsys.readouterr().out


def test_columns_do_not_touch() -> None:
    """The longest runs there are: as long as the request."""
    long = row("stock", "random", 4096, 1.0, pages_per_run=4096.0, pages_per_remote_run=4096.0)
    lines = report.text(figures(long)).splitlines()
    (line,) = (line for line in lines if line.startswith("random"))
    assert line.split()[:5] == ["random", "4096", "4096.0,", "4096.0", "stock"]
    (head,) = (line for line in lines if line.startswith("ids"))
    assert head.index("arm") == line.index("stock")


def test_the_figures_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="MATPLOTLIB IS MISSING: NOTHING WAS DRAWN")
    data, picture = tmp_path / "figures.json", tmp_path / "figures.png"
    data.write_text(json.dumps(figures(row("stock", "random", 256, 30.0))))
    parser = argparse.ArgumentParser()
    bench_transfer.add_arguments(parser)
    words = ["--from-json", str(data), "--plot", str(picture)]
    assert bench_transfer.run(parser.parse_args(words)) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("bench", ["transfer", "convert"])
def test_files_that_are_no_figures(
    bench: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "figures.json"
    command = ["bench", bench, "--from-json", str(path)]
    for content, said in (
        (None, "No such file"),
        (b"\xff{", "is not a file of"),
        (b"[" * 100_000, "is not a file of"),
        (b"[1]", "list"),
        (b'{"rows": []}', "no device, "),
    ):
        if content is not None:
            path.write_bytes(content)
        assert main(command) == 2
        complaint = capsys.readouterr().err
        assert complaint.startswith("kvpd: error: ") and said in complaint
        assert f"`kvpd bench {bench} --json`" in complaint


def test_figures_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "figures.json"
    path.write_text(json.dumps(figures(row("stock", "random", 256, 30.0))))
    nowhere = str(tmp_path / "none" / "figures.json")
    assert main(["bench", "transfer", "--from-json", str(path), "--json", nowhere]) == 2
    assert "No such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["--arms", "stock,stok"], ["--patterns", "odd"], ["--blocks", "1,x"]]
)
def test_bad_arguments(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    bench_transfer.add_arguments(parser)
    assert bench_transfer.run(parser.parse_args(words)) == 2
    assert words[0] in capsys.readouterr().err


@pytest.mark.parametrize("bench", ["convert", "transfer"])
def test_without_a_gpu_nothing_is_measured(
    bench: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither the host's memory in its place, nor a status that says that pages are wrong."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert main(["bench", bench]) == 2
    assert "torch sees no GPU" in capsys.readouterr().err


def test_traces_are_what_an_engine_can_have() -> None:
    """The shipped traces: pairs of distinct blocks inside the pools they were recorded in."""
    assert TRACES
    for path in TRACES:
        trace = json.loads(path.read_text())
        (workload,) = recorded([path], trace["load"]["num_blocks"], 1000)
        assert len(trace["requests"]) == trace["load"]["num_requests"]
        assert workload.num_blocks == sum(len(entry["local"]) for entry in trace["requests"]) > 0
        # Block 0 is vLLM's null block: no request has it.
        assert all(int(ids.min()) > 0 for request in workload.requests for ids in request)
        joint, alone = workload.pages_per_run
        assert 1 <= joint <= alone
