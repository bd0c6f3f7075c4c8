"""Pairs of engines, and what ``kvpd check`` says of them."""

from __future__ import annotations

import json
from contextlib import ExitStack
from typing import Any

import jsonschema
import pytest

from kvpd import EngineDescription, Region
from kvpd.cli import main
from kvpd.cli.inspect.engine import Engine
from kvpd.vllm.published import decode_payload
from tests.engine_builder import engine, facts, page_format
from tests.fake_side_channel import listening, payload, stock_fields, tagged_fields
from tests.make_schemas import FOLDER

STANDARD = engine()
SHUFFLED = engine("aiter_shuffle", "LHBNC")
CONVERT = ("--enable-conversion",)
OTHER_DIGEST = "e" * 64


def kvpd_engine(
    description: EngineDescription, name: str, digest: str = "d" * 64, **changes: Any
) -> bytes:
    return payload(tagged_fields(description, engine_id=name, **changes), digest)


def stock_engine(digest: str = "d" * 64, **changes: Any) -> bytes:
    return payload(stock_fields(**changes), digest)


def side(blob: bytes, source: str = "file") -> Engine:
    return Engine(source, 0, decode_payload(blob))


def checked(
    capsys: pytest.CaptureFixture[str], prefill: bytes, decode: bytes, *options: str
) -> tuple[int, dict[str, Any]]:
    """Exit status and JSON, over two real sockets; the JSON is as documented."""
    with ExitStack() as stack:
        addresses = [stack.enter_context(listening({0: blob})) for blob in (prefill, decode)]
        status = main(["check", *addresses, *options, "--json"])
    value: dict[str, Any] = json.loads(capsys.readouterr().out)
    schema = json.loads((FOLDER / "check.json").read_text())
    jsonschema.validate(value, schema, jsonschema.Draft202012Validator)
    return status, value


def codes(findings: list[dict[str, str]]) -> list[str]:
    return [finding["code"] for finding in findings]


LARGE_BLOCKS = 256
PAGE_BYTES = 4 * 16 * 2 * 64 * 2


def large(kind: str, layout: str, memory: Any = "vram") -> EngineDescription:
    """Three layers of 256 blocks; regions written out, by hand."""
    format, lengths = page_format(kind), {"LBHNC": [PAGE_BYTES], "LHBNC": [PAGE_BYTES // 2] * 2}
    regions, address = [], 1 << 40
    for layer in range(3):
        for plane, length in enumerate(lengths[layout]):
            regions.append(
                Region(
                    address,
                    LARGE_BLOCKS,
                    length,
                    length,
                    format=format,
                    planes=[plane],
                    layers=[f"layer.{layer}"],
                    memory=memory,
                )
            )
            address += LARGE_BLOCKS * length
    return EngineDescription(facts(layout=layout), regions)
