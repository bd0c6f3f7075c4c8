"""Write docs/schemas from the types that the tools print: python -m tests.make_schemas"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec

from kvpd.cli.check.result import CheckResult
from kvpd.cli.formats.drawing import Drawing
from kvpd.cli.formats.sheet import Sheet
from kvpd.cli.inspect.inspection import Inspection

FOLDER = Path(__file__).parents[1] / "docs" / "schemas"
TYPES: dict[str, type[msgspec.Struct]] = {
    "inspect": Inspection,
    "check": CheckResult,
    "formats": Sheet,
    "formats-show": Drawing,
}


def schema(name: str) -> dict[str, Any]:
    """The JSON schema of what one command prints with --json."""
    dialect = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    return dialect | msgspec.json.schema(TYPES[name])


def text(name: str) -> str:
    """The file's content."""
    return json.dumps(schema(name), indent=2) + "\n"


def main() -> int:
    FOLDER.mkdir(exist_ok=True)
    for name in TYPES:
        (FOLDER / f"{name}.json").write_text(text(name))
    return 0


if __name__ == "__main__":
    sys.exit(main())
