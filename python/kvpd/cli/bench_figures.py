"""Figures of a bench as a file: written after a measurement, read again to print or draw them."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from kvpd.errors import KvpdError, MissingDependencyError


def load(path: Path, bench: str, fields: Collection[str]) -> dict[str, Any]:
    """Read what a bench wrote.

    Args:
        bench: the command that writes such files, for messages.
        fields: what every one of them has.

    Raises:
        KvpdError: the file cannot be read, or is of something else.
    """
    expected = f"a file of `{bench} --json`"
    try:
        figures = json.loads(path.read_bytes())
    except OSError as error:
        raise KvpdError(
            f"{path}: {error.strerror}; expected {expected}",
            code="unreadable",
            field="from-json",
            got=error.strerror,
            expected=expected,
        ) from error
    except (ValueError, RecursionError) as error:
        raise _other(path, expected, str(error)) from error
    if not isinstance(figures, dict):
        raise _other(path, expected, type(figures).__name__)
    missing = sorted(set(fields) - figures.keys())
    if missing:
        raise _other(path, expected, f"no {', '.join(missing)}")
    return figures


def store(path: Path, figures: dict[str, Any]) -> None:
    """Write them for `load`.

    Raises:
        KvpdError: the file cannot be written.
    """
    try:
        path.write_text(json.dumps(figures, indent=1) + "\n")
    except OSError as error:
        raise KvpdError(
            f"{path}: {error.strerror}", code="unwritable", field="json", got=error.strerror
        ) from error


def load_pyplot() -> Any:
    """matplotlib's pyplot, for drawing into files.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise MissingDependencyError(
            "drawing needs matplotlib: pip install 'kvpd[bench]'",
            code="missing-dependency",
            field="matplotlib",
            got="not installed",
            expected="kvpd[bench]",
        ) from error
    return pyplot


def _other(path: Path, expected: str, got: str) -> KvpdError:
    return KvpdError(
        f"{path} is not {expected}: {got}",
        code="invalid-file",
        field="from-json",
        got=got,
        expected=expected,
    )
