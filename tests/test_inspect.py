"""``kvpd inspect`` against a listener like vLLM's: what is shown, saved, read again."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from kvpd import EngineDescription, wire
from kvpd.cli import main
from kvpd.cli.inspect.engine import Rank, engine_of
from kvpd.cli.inspect.inspection import Inspection, load
from kvpd.errors import KvpdError
from kvpd.vllm.published import decode_payload
from kvpd.vllm.sidechannel import Address
from tests.engine_builder import engine
from tests.fake_side_channel import listening, payload, stock_fields
from tests.inspect_support import SHUFFLED, inspected, tagged, valid
from tests.make_schemas import FOLDER, TYPES, text


def test_a_stock_engine_is_untagged_and_fits_several_formats(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shown = inspected(capsys, payload(stock_fields()))
    for expected in (
        "stock connector, untagged",
        "layout      LBHNC",
        "backend     FLASH_ATTN",
        "block size  16 tokens",
        # 3 layers x 11 blocks x 16,384 bytes
        "3 regions of 3 layers, 528 KiB registered",
        "layer.0 ... layer.2 (3)",
        "cannot be told apart",
    ):
        assert expected in shown
    lines = {line.split()[0]: line for line in shown.splitlines() if line.strip()}
    assert "4x64, 2x128" in lines["standard"]
    assert "4x64, 2x128" in lines["aiter-shuffle"]


def test_a_tagged_engine_shows_its_pages(capsys: pytest.CaptureFixture[str]) -> None:
    shown = inspected(capsys, tagged(SHUFFLED))
    for expected in (
        "kvpd's connector, tagged",
        "vLLM           0.33.0",
        "some/model, bfloat16",
        "quantization none",
        "weights        weights 1",
        "configuration  1 field, ",
        "4 KV heads of 64, bfloat16",
        "speculative    none",
        "TP rank 0 of 1",
        "page format    aiter-shuffle(H=4, N=16, D=64, bfloat16, v=tiled)",
        "6 regions of 3 layers, 528 KiB registered",
        "plane 0",
        "plane 1",
    ):
        assert expected in shown
    assert "told apart" not in shown
    # Three layers are one row each of K and V.
    assert shown.count("layer.0 ... layer.2 (3)") == 2


def test_what_is_not_known_of_a_model_is_called_so(capsys: pytest.CaptureFixture[str]) -> None:
    shown = inspected(capsys, tagged(engine(model_config=None, model_weights=None)))
    assert shown.count("unknown; the engine's log says why") == 2
    shown = inspected(capsys, tagged(QUANTISED))
    assert "float8_e4m3fn (set as fp8), scales of 2 layers" in shown


def test_padded_regions_are_called_so(capsys: pytest.CaptureFixture[str]) -> None:
    shown = inspected(capsys, payload(stock_fields(block_strides=[16_384, 16_384, 20_480])))
    assert "20,480 padded" in shown
    assert "layer.0, layer.1 " in shown


QUANTISED = engine(
    quantised_cache=True,
    cache_dtype="float8_e4m3fn",
    cache_dtype_setting="fp8",
    scales=[("layer.0", [0.1], [1e-30]), ("layer.1", [0.5, 2.0], [3.0])],
)


@pytest.mark.parametrize(
    "description", [engine(), SHUFFLED, QUANTISED], ids=["standard", "shuffled", "quantised"]
)
def test_saved_and_read_again(
    description: EngineDescription, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    blob, target = tagged(description), tmp_path / "engine.json"
    printed = inspected(capsys, blob, "--json", "--save", str(target))
    assert printed == target.read_text()
    valid(printed)
    original, again = decode_payload(blob), load(target).published()
    assert again.digest == original.digest
    assert msgspec.structs.replace(again.metadata, kvpd=None) == msgspec.structs.replace(
        original.metadata, kvpd=None
    )
    expected = wire.Handshake("engine-kvpd", description)
    assert again.handshake() == original.handshake() == expected
    # What is shown of a file is what was shown of the engine.
    assert main(["inspect", str(target), "--json"]) == 0
    assert capsys.readouterr().out == printed


def test_a_stock_engine_is_saved_and_read_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "stock.json"
    valid(inspected(capsys, payload(stock_fields()), "--json", "--save", str(target)))
    again = load(target).published()
    assert again == decode_payload(payload(stock_fields()))
    assert again.handshake() is None


def test_the_documented_schemas_are_those_of_the_types() -> None:
    for name in TYPES:
        assert (FOLDER / f"{name}.json").read_text() == text(name), "python -m tests.make_schemas"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "expected HOST:PORT or a file"),
        (b"", "is not a file of"),
        (b"[1, 2]", "is not a file of"),
        (b'{"kind": "kvpd-inspection"}', "is not a file of"),
        (b"[" * 100_000, "is not a file of"),
        (b"\xff\xfe", "is not a file of"),
    ],
    ids=["missing", "empty", "list", "incomplete", "deep", "binary"],
)
def test_files_that_are_none(
    content: bytes | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "engine.json"
    if content is not None:
        target.write_bytes(content)
    assert main(["inspect", str(target)]) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert shown.count("\n") == 1


def test_a_file_with_an_edited_tag_is_no_valid_handshake(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is read again goes through the same door as what comes over the network."""
    target = tmp_path / "engine.json"
    inspected(capsys, tagged(SHUFFLED), "--save", str(target))
    value = json.loads(target.read_text())
    value["tag"]["body"]["formats"][0]["components"][0]["head_stride_bytes"] += 2
    target.write_text(json.dumps(value))
    assert main(["inspect", str(target)]) == 0
    assert "its tag cannot be read" in capsys.readouterr().out
    assert main(["check", str(target), str(target)]) == 2


def test_an_inspection_of_the_engine_that_answered() -> None:
    with listening({0: tagged(SHUFFLED)}) as address:
        found = engine_of(address, Rank())
        inspection = Inspection.of(found.published, found.source, found.tp_rank)
    assert (inspection.source, inspection.tp_rank) == (address, 0)
    assert inspection.metadata.engine_id == "engine-kvpd"


def test_another_rank(capsys: pytest.CaptureFixture[str]) -> None:
    ranks = {rank: tagged(engine(tp_size=2, tp_rank=rank)) for rank in range(2)}
    with listening(ranks) as address:
        assert main(["inspect", address, "--tp-rank", "1"]) == 0
        assert "TP rank 1 of 2" in capsys.readouterr().out


def test_a_file_of_another_rank_is_not_taken_for_the_one_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "rank1.json"
    ranks = {rank: tagged(engine(tp_size=3, tp_rank=rank)) for rank in range(3)}
    with listening(ranks) as address:
        assert main(["inspect", address, "--tp-rank", "1", "--save", str(target)]) == 0
    assert main(["inspect", str(target)]) == main(["inspect", str(target), "--tp-rank", "1"]) == 0
    capsys.readouterr()
    for command in (["inspect", str(target)], ["check", str(target), str(target)]):
        assert main([*command, "--tp-rank", "2"]) == 2
        shown = capsys.readouterr()
        assert shown.out == ""
        assert "was saved of tensor-parallel rank 1, not of rank 2" in shown.err
    with pytest.raises(KvpdError) as caught:
        engine_of(str(target), Rank(2))
    assert (caught.value.code, caught.value.field) == ("no-such-rank", "tp_rank")
    assert (caught.value.got, caught.value.expected) == ("2", "1")


@pytest.mark.parametrize(
    ("blob", "options", "code"),
    [
        (tagged(engine(tp_size=2)), [], "the tensor-parallel size of {} is 2"),
        (payload(stock_fields()), [], "say --tp-size"),
        (payload(stock_fields()), ["--tp-size", "5"], "the tensor-parallel size of {} is 5"),
    ],
    ids=["tagged", "stock", "stock-with-size"],
)
def test_a_rank_that_may_not_exist_is_never_asked_for(
    blob: bytes, options: list[str], code: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The listener, as vLLM's, would be gone for every later peer."""
    with listening({0: blob}) as address:
        assert main(["inspect", address, "--tp-rank", "5", *options]) == 2
        assert code.format(address) in capsys.readouterr().err
        assert main(["inspect", address]) == 0


def test_the_fake_listener_is_as_fragile_as_vllms(capsys: pytest.CaptureFixture[str]) -> None:
    """Else the test above could not fail: told a wrong size, the tool does end the listener."""
    with listening({0: payload(stock_fields())}) as address:
        wrong = ["--tp-rank", "5", "--tp-size", "6", "--timeout", "2"]
        assert main(["inspect", address, *wrong]) == 2
        assert main(["inspect", address, "--timeout", "2"]) == 2


@pytest.mark.parametrize(
    ("text_", "expected"),
    [
        ("10.0.0.1:5600", Address("10.0.0.1", 5600)),
        ("prefill.cluster:1", Address("prefill.cluster", 1)),
        ("[fd00::1]:5600", Address("fd00::1", 5600)),
        ("fd00::1:5600", None),
        ("host:0", None),
        ("host:65536", None),
        ("host:", None),
        (":5600", None),
        ("dir/host:5600", None),
        ("prefill.json", None),
        ("host:\u0665", None),
    ],
)
def test_addresses(text_: str, expected: Address | None) -> None:
    assert Address.of(text_) == expected
    if expected is not None:
        assert str(expected) == text_
