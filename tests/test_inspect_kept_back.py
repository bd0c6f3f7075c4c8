"""What ``kvpd inspect`` keeps back, and parts and versions that it does not know."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvpd import EngineDescription, Region, wire
from kvpd.cli import main
from kvpd.cli.inspect.inspection import load
from tests.engine_builder import engine
from tests.fake_side_channel import NIXL_KEYS, listening, payload, stock_fields, tagged_fields
from tests.inspect_support import SHUFFLED, inspected, tagged, valid, with_body

SECRET = b"\x01\x02hush-hush\xfe"


@pytest.mark.parametrize(
    "parts",
    [
        {"nixl_metadata": SECRET},
        {"part": {"host": "hush", "blob": SECRET}},
        {"part": {"entries": [{"at": [{"key": SECRET}]}]}},
        {"part": {"entries": [1, SECRET]}},
        {"part": {"ipc_handle": SECRET.hex()}},
        {"handles": [SECRET.hex()]},
    ],
    ids=["nixl", "bytes", "nested", "list", "named", "named-part"],
)
def test_keys_and_handles_are_nowhere(
    parts: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "engine.json"
    blob = with_body(parts)
    assert SECRET in blob or SECRET.hex().encode() in blob
    shown = inspected(capsys, blob, "--save", str(target))
    printed = inspected(capsys, blob, "--json")
    for secret in (SECRET, NIXL_KEYS):
        spellings = [secret.hex(), base64.b64encode(secret).decode(), "hush", "REMOTE-KEYS"]
        for found in (shown, printed, target.read_text()):
            assert not [spelling for spelling in spellings if spelling in found]
    # It is said that something was left out, except NIXL's part, which every handshake has.
    assert ("not shown and not saved" in shown) is ("nixl_metadata" not in parts)
    # The file is still a handshake.
    assert load(target).published().handshake() is not None


def test_optional_parts_are_shown_whatever_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    part = {"runtime": "cuda", "host": {"boot_id": "b", "pid": 7}, "more": [1, 2, None]}
    blob = with_body({"some_part": part})
    shown = inspected(capsys, blob)
    assert 'some_part  {"runtime": "cuda", "host": {"boot_id": "b", "pid": 7}' in shown
    value = valid(inspected(capsys, blob, "--json"))
    assert value["summary"]["optional_parts"] == {"some_part": part}


def test_a_newer_tag_is_named_and_the_rest_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    blob = with_body({"formats": "another idea of formats"}, version=wire.WIRE_VERSION + 1)
    shown = inspected(capsys, blob)
    assert "its tag cannot be read: the peer speaks kvpd wire version 3, this is 2" in shown
    assert "6 regions" in shown
    value = valid(inspected(capsys, blob, "--json"))
    assert value["summary"]["tag_problem"]["code"] == "wire-version"


@pytest.mark.parametrize("tag", [b"", b"\xc1", b"\x93\x01\x02\x03", bytes(100)])
def test_a_tag_of_garbage(tag: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    blob = payload(tagged_fields(SHUFFLED, kvpd=tag))
    assert "its tag cannot be read" in inspected(capsys, blob)
    assert valid(inspected(capsys, blob, "--json"))["summary"]["tag_problem"]


def test_a_newer_engine_with_more_fields(capsys: pytest.CaptureFixture[str]) -> None:
    fields = stock_fields(brand_new={"a": [1, b"x"]})
    outer = msgspec.msgpack.decode(payload(fields)) | {"also_new": 1}
    assert "untagged" in inspected(capsys, msgspec.msgpack.encode(outer))


def test_names_cannot_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    evil = "\x1b[2J\x1b]0;owned\x07\u202e\nrank 0: fine"
    fields = tagged_fields(SHUFFLED, engine_id=evil, attn_backend_name=evil, kv_cache_layout=evil)
    shown = inspected(capsys, payload(fields))
    assert not [c for c in shown if not c.isprintable() and c != "\n"]
    assert "\\x1b[2J" in shown
    assert "\nrank 0: fine" not in shown


def test_a_name_is_asked_where_somebody_listens(capsys: pytest.CaptureFixture[str]) -> None:
    """It can have addresses of both families, and the engine listens on one of them."""
    with listening({0: payload(stock_fields())}) as address:
        assert main(["inspect", address.replace("127.0.0.1", "localhost")]) == 0
    assert capsys.readouterr().out.startswith("localhost:")


def test_layers_of_different_formats_are_described_and_not_guessed_at(
    capsys: pytest.CaptureFixture[str],
) -> None:
    kinds = [engine("standard", layers=("a",)), engine("split_kv", layers=("b",))]
    moved = [
        Region(
            region.address + index * (1 << 30),
            region.num_blocks,
            region.block_bytes,
            region.block_stride_bytes,
            format=region.format,
            planes=region.planes,
            layers=region.layers,
        )
        for index, description in enumerate(kinds)
        for region in description.regions
    ]
    shown = inspected(capsys, tagged(EngineDescription(kinds[0].facts, moved)))
    assert "standard(H=4" in shown
    assert "split-kv(H=4" in shown
    assert "fits" not in shown
