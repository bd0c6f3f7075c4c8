"""What a pair costs, by formulas written here; kernels; what is needed to be told."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvpd import PageFormat
from kvpd.cli import main
from kvpd.cli.check.kernels import kernel_problems
from kvpd.cli.inspect.inspection import Inspection
from kvpd.direct import DirectPart, HostIdentity
from kvpd.vllm.published import decode_payload
from kvpd.wire import Handshake, encode_tag
from tests.check_support import (
    CONVERT,
    PAGE_BYTES,
    STANDARD,
    checked,
    codes,
    kvpd_engine,
    large,
    stock_engine,
)
from tests.engine_builder import page_format
from tests.fake_side_channel import listening


def test_cost_of_a_conversion(capsys: pytest.CaptureFixture[str]) -> None:
    """1,000 tokens are 63 blocks of 16, in 3 layers."""
    prefill = kvpd_engine(large("standard", "LBHNC"), "P")
    decode = kvpd_engine(large("aiter_shuffle", "LHBNC"), "D")
    rates = ["--link-gb-per-second", "100", "--us-per-descriptor", "2"]
    rates += ["--convert-gb-per-second", "500"]
    _, value = checked(capsys, prefill, decode, *CONVERT, *rates)
    cost, pages, num_bytes = value["cost"], 63, 63 * 3 * PAGE_BYTES
    assert (cost["num_pages"], cost["num_tokens"], cost["num_bytes"]) == (pages, 1008, num_bytes)
    assert cost["bytes_per_1k_tokens"] == 1000 * 3 * PAGE_BYTES // 16
    assert cost["convert_ms"] == pytest.approx(num_bytes / 500e9 * 1e3, abs=1e-4)
    in_place, staged = cost["placements"]
    # Two half pages a page and layer, none of which merge.
    assert in_place["placement"] == "in_place"
    assert in_place["num_descriptors"] == in_place["merged_scattered"] == pages * 3 * 2
    assert in_place["merged_consecutive"] == pages * 3 * 2
    # A whole page each; a run of one layer is one descriptor in every chunk.
    assert staged["placement"] == "staged"
    assert staged["num_descriptors"] == staged["merged_scattered"] == pages * 3
    assert 3 <= staged["merged_consecutive"] < pages
    # One READ, its descriptors, its bytes, then the conversion.
    expected = 50e-6 + pages * 6 * 2e-6 + num_bytes / 100e9 + num_bytes / 500e9
    assert in_place["ms_scattered"] == pytest.approx(expected * 1e3, abs=1e-3)


def test_cost_of_equal_pages(capsys: pytest.CaptureFixture[str]) -> None:
    prefill, decode = (kvpd_engine(large("standard", "LBHNC"), name) for name in "PD")
    _, value = checked(capsys, prefill, decode)
    (as_stock,) = value["cost"]["placements"]
    assert as_stock["placement"] == "as_stock"
    assert as_stock["num_descriptors"] == as_stock["merged_scattered"] == 63 * 3
    assert as_stock["merged_consecutive"] == 3
    assert value["cost"]["convert_ms"] is None


def test_cost_is_shown_and_explained(capsys: pytest.CaptureFixture[str]) -> None:
    prefill = kvpd_engine(large("standard", "LBHNC"), "P")
    decode = kvpd_engine(large("aiter_shuffle", "LHBNC"), "D")
    with listening({0: prefill}) as p, listening({0: decode}) as d:
        assert main(["check", p, d, *CONVERT, "--explain"]) == 0
    shown = capsys.readouterr().out
    assert "works: pages are converted on the decoder" in shown
    assert "378 to 378" in shown
    assert "plan, in a slab for all of it, scattered" in shown


def test_the_link_can_be_given_as_the_connectors_key(capsys: pytest.CaptureFixture[str]) -> None:
    prefill, decode = (kvpd_engine(large("standard", "LBHNC"), name) for name in "PD")
    rates = {"bytes_per_second": 50e9, "seconds_per_descriptor": 1e-6}
    _, value = checked(capsys, prefill, decode, "--link", json.dumps(rates))
    link = value["cost"]["link"]
    assert {name: link[name] for name in rates} == rates
    # What is read directly passes the same link.
    assert link["direct_bytes_per_second"] == rates["bytes_per_second"]
    # One 50 us chunk, a descriptor a page and layer, the bytes.
    expected = 50e-6 + 63 * 3 * 1e-6 + 63 * 3 * PAGE_BYTES / 50e9
    (as_stock,) = value["cost"]["placements"]
    assert as_stock["ms_scattered"] == pytest.approx(expected * 1e3, abs=1e-3)
    with listening({0: prefill}) as p, listening({0: decode}) as d:
        assert main(["check", p, d, "--link", '{"warp": 9}']) == 2
    assert "kv_connector_extra_config.link" in capsys.readouterr().err


def test_direct_transfer_needs_an_offer(capsys: pytest.CaptureFixture[str]) -> None:
    description = large("standard", "LBHNC")
    uuid = "12345678-1234-1234-1234-123456789abc"
    host = HostIdentity(uuid, 1, 2, 3, 4, 5)
    part = DirectPart("cuda", host, f"GPU-{uuid}", "kvpd-direct-" + 32 * "0")
    tag = encode_tag(Handshake("P", description, direct=part))
    offering = kvpd_engine(description, "P", kvpd=tag)
    decode = kvpd_engine(large("aiter_shuffle", "LHBNC"), "D")
    _, value = checked(capsys, offering, decode, *CONVERT, "--direct-transfer")
    assert value["warnings"] == []
    direct = value["cost"]["placements"][-1]
    # Nothing is read by NIXL; a launch, and the bytes at 360 GB/s whatever the ids.
    assert (direct["placement"], direct["num_descriptors"]) == ("direct", 0)
    expected = 50e-6 + 63 * 3 * PAGE_BYTES / 360e9
    assert direct["ms_scattered"] == direct["ms_consecutive"]
    assert direct["ms_scattered"] == pytest.approx(expected * 1e3, rel=0.05)
    _, value = checked(capsys, offering, decode, *CONVERT)
    assert "direct" not in [p["placement"] for p in value["cost"]["placements"]]
    equal = kvpd_engine(description, "D")
    for decoder, options, headline in (
        (equal, ["--direct-transfer"], "works: equal pages, read directly where"),
        (equal, [], "works: equal pages, served as stock does\n"),
        (decode, [*CONVERT, "--direct-transfer"], "converted on the decoder, read directly where"),
        (decode, CONVERT, "converted on the decoder\n"),
    ):
        with listening({0: offering}) as p, listening({0: decoder}) as d:
            assert main(["check", p, d, *options]) == 0
        assert headline in capsys.readouterr().out
    silent = kvpd_engine(description, "P")
    _, value = checked(capsys, silent, decode, *CONVERT, "--direct-transfer")
    assert codes(value["warnings"]) == ["direct-not-offered"]
    assert "direct" not in [p["placement"] for p in value["cost"]["placements"]]


def test_padded_regions_are_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    wide = stock_engine(block_strides=[20_480] * 3)
    _, value = checked(capsys, wide, stock_engine())
    assert codes(value["warnings"]) == ["padded-regions"]
    _, value = checked(capsys, stock_engine(), stock_engine())
    assert value["warnings"] == []


@pytest.mark.parametrize("option", ["--link-gb-per-second", "--us-per-descriptor"])
@pytest.mark.parametrize("number", ["0", "-1", "nan", "inf", "x"])
def test_rates_that_cannot_be(option: str, number: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["check", "p", "d", option, number])
    assert ended.value.code == 2
    assert option in capsys.readouterr().err


NARROW: dict[str, Any] = {"heads": 4, "tokens": 16, "head_dim": 4, "dtype": "bfloat16"}


@pytest.mark.parametrize(("memory", "refused"), [("vram", True), ("dram", False)])
def test_kernels_that_will_not_take_the_shape(memory: Any, refused: bool) -> None:
    """Rows of 8 bytes, which 16-byte vectors cannot reach; the core has no vectors."""
    verdict: Any = SimpleNamespace(
        source=PageFormat.standard(**NARROW), target=PageFormat.split_kv(**NARROW)
    )
    problems = kernel_problems(verdict, large("standard", "LBHNC", memory))
    assert bool(problems.reasons) is refused
    assert problems.doubts == ()


def test_kernels_take_what_is_in_scope() -> None:
    verdict: Any = SimpleNamespace(
        source=page_format("standard"), target=page_format("aiter_shuffle")
    )
    problems = kernel_problems(verdict, large("aiter_shuffle", "LHBNC"))
    assert (problems.reasons, problems.doubts) == ((), ())


def test_without_torch_the_kernels_are_a_doubt(tmp_path: Path) -> None:
    paths = []
    for name, blob in (
        ("P", kvpd_engine(large("standard", "LBHNC"), "P")),
        ("D", kvpd_engine(large("aiter_shuffle", "LHBNC"), "D")),
    ):
        paths.append(str(tmp_path / f"{name}.json"))
        inspection = Inspection.of(decode_payload(blob), name, 0)
        Path(paths[-1]).write_bytes(inspection.to_json())
    arguments = ["check", *paths, *CONVERT, "--json"]
    program = (
        "import sys; sys.modules['torch'] = None; from kvpd.cli import main; "
        f"sys.exit(main({arguments!r}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "")
    value = json.loads(done.stdout)
    assert codes(value["doubts"]) == ["kernel-unknown"]
    assert "kvpd[convert]" in value["doubts"][0]["remedy"]


def test_files_need_neither_zeromq_nor_torch(tmp_path: Path) -> None:
    """Saved files of engines in host memory are checked with the base installation."""
    path = tmp_path / "engine.json"
    path.write_bytes(Inspection.of(decode_payload(kvpd_engine(STANDARD, "D")), "D", 0).to_json())
    program = (
        "import sys; sys.modules.update(torch=None, zmq=None, shtab=None); "
        "from kvpd.cli import main; "
        f"status = main(['check', {str(path)!r}, {str(path)!r}]); "
        "asked = main(['inspect', '127.0.0.1:9']); sys.exit(status * 10 + asked)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 2
    assert "pip install 'kvpd[tools]'" in done.stderr
