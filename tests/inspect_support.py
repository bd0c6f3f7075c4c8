"""Engines to inspect, and what ``kvpd inspect`` prints of them."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import msgspec
import pytest

from kvpd import EngineDescription, wire
from kvpd.cli import main
from tests.engine_builder import engine
from tests.fake_side_channel import listening, payload, tagged_fields
from tests.make_schemas import FOLDER

SHUFFLED = engine("aiter_shuffle", "LHBNC")


def tagged(description: EngineDescription, **changes: Any) -> bytes:
    return payload(tagged_fields(description, **changes))


def with_body(changes: dict[str, Any], version: int = wire.WIRE_VERSION) -> bytes:
    """A payload whose tag has other or more parts."""
    fields = tagged_fields(SHUFFLED)
    tag = msgspec.msgpack.decode(fields["kvpd"])
    tag = {"version": version, "body": {**tag["body"], **changes}}
    return payload({**fields, "kvpd": msgspec.msgpack.encode(tag)})


def inspected(capsys: pytest.CaptureFixture[str], blob: bytes, *options: str) -> str:
    with listening({0: blob}) as address:
        assert main(["inspect", address, *options]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    return shown.out


def valid(text_: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(text_)
    schema = json.loads((FOLDER / "inspect.json").read_text())
    jsonschema.validate(value, schema, jsonschema.Draft202012Validator)
    return value
