"""What kvpd makes of vLLM's attention backends, as one table: python -m tests.vllm.backend_table

Scans every release (backend_scan.py) and writes docs/data/backends.json, and from it the section
"Backends" of docs/vllm.md. `tests/vllm/test_backends.py` compares both with a new scan.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tests.vllm.client import ROOT
from tests.vllm.releases import RELEASES, missing, scanned

DATA = ROOT / "docs" / "data" / "backends.json"
DOC = ROOT / "docs" / "vllm.md"
BEGIN = "<!-- written by python -m tests.vllm.backend_table -->\n"
END = "<!-- end of the table -->\n"
KNOWN = ("standard", "aiter-shuffle")
_PREFIX = "vllm."
_BACKENDS = "vllm.v1.attention.backends."


def table_of(found: Mapping[str, Iterable[Mapping[str, Any]]]) -> dict[str, Any]:
    """The findings of all releases, equal ones once.

    Args:
        found: by release, what its scan printed.
    """
    classes: dict[tuple[str, str], dict[str, Any]] = {}
    writers: dict[str, dict[str, Any]] = {}
    for release, findings in found.items():
        for finding in findings:
            if finding["kind"] == "class":
                _add(classes, finding, release, finding["variant"], _row(finding))
            elif finding["kind"] == "missing":
                _add(classes, finding, release, "", {"missing": True})
            elif finding["kind"] == "written" and finding["family"] in KNOWN:
                seen = writers.setdefault(finding["class"], {"by": finding["by"], "releases": []})
                if release not in seen["releases"]:
                    seen["releases"].append(release)
    return {
        "releases": list(found),
        "backends": [classes[key] for key in sorted(classes)],
        "writers": writers,
    }


def _add(
    classes: dict[tuple[str, str], dict[str, Any]],
    finding: Mapping[str, Any],
    release: str,
    variant: str,
    row: dict[str, Any],
) -> None:
    entry = classes.setdefault(
        (finding["class"], variant),
        {"class": finding["class"], "enum": finding["enum"], "variant": variant, "rows": []},
    )
    entry["enum"] = sorted({*entry["enum"], *finding["enum"]})
    for known in entry["rows"]:
        if {k: v for k, v in known.items() if k != "releases"} == row:
            known["releases"].append(release)
            return
    entry["rows"].append({"releases": [release], **row})


def _row(finding: Mapping[str, Any]) -> dict[str, Any]:
    """Element types of equal outcome together."""
    if not finding["pages"]:
        return {"abstract": True}
    pages: list[dict[str, Any]] = []
    for dtype, outcomes in finding["pages"].items():
        for group in pages:
            if group["outcomes"] == outcomes:
                group["dtypes"].append(dtype)
                break
        else:
            pages.append({"dtypes": [dtype], "outcomes": outcomes})
    return {
        "name": finding["name"],
        "layouts": finding["layouts"] or "any",
        "asks_for": finding["asks_for"],
        "pages": pages,
    }


def render(table: Mapping[str, Any]) -> str:
    """The section's two tables: backends with a known format, then the others by outcome."""
    lines = [
        "| backend | releases | layouts it takes | kvpd asks for | pages, by element type |",
        "|---|---|---|---|---|",
    ]
    others: dict[str, list[str]] = {}
    for entry in table["backends"]:
        for row in entry["rows"]:
            if _is_known(row):
                lines.append(_known(table, entry, row))
            elif not _is_like_base(table, entry, row):
                others.setdefault(_summary(row), []).append(
                    _label(entry) + _when(table, row["releases"])
                )
    lines += ["", "| pages | backends |", "|---|---|"]
    lines += [f"| {summary} | {', '.join(names)} |" for summary, names in sorted(others.items())]
    return "\n".join(lines) + "\n"


def _is_known(row: Mapping[str, Any]) -> bool:
    return any(outcome in KNOWN for group in row.get("pages", []) for outcome in group["outcomes"])


def _is_like_base(table: Mapping[str, Any], entry: Mapping[str, Any], row: Any) -> bool:
    """Whether kvpd makes the same of the class without the variant."""
    (base,) = (e for e in table["backends"] if e["class"] == entry["class"] and not e["variant"])
    return bool(entry["variant"]) and any(
        _summary(other) == _summary(row)
        for other in base["rows"]
        if set(other["releases"]) & set(row["releases"])
    )


def _known(table: Mapping[str, Any], entry: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    layouts = row["layouts"] if isinstance(row["layouts"], str) else ", ".join(row["layouts"])
    asks = ", ".join("stock's" if name == "None" else name for name in row["asks_for"])
    cells = (_label(entry), _span(table, row["releases"]), layouts, asks, _summary(row))
    return f"| {' | '.join(cells)} |"


def _label(entry: Mapping[str, Any]) -> str:
    """The enum's name, else where the class is."""
    path = str(entry["class"])
    name = entry["enum"][0] if entry["enum"] else path.removeprefix(_BACKENDS)
    variant = f" ({entry['variant']})" if entry["variant"] else ""
    return f"`{name.removeprefix(_PREFIX)}`{variant}"


def _summary(row: Mapping[str, Any]) -> str:
    """What becomes of the pages; element types are named where they matter."""
    if row.get("missing"):
        return "named by vLLM, but not in the release"
    if row.get("abstract"):
        return "an abstract class"
    texts: dict[str, list[str]] = {}
    for group in row["pages"]:
        outcomes = group["outcomes"]
        text = "; ".join(
            outcome if len(outcomes) == 1 else f"{outcome} in {', '.join(sorted(layouts))}"
            for outcome, layouts in sorted(outcomes.items())
        )
        texts.setdefault(text, []).extend(group["dtypes"])
    if len(texts) == 1:
        return next(iter(texts))
    return ". ".join(f"{_types(dtypes)}: {text}" for text, dtypes in texts.items())


def _types(dtypes: Sequence[str]) -> str:
    """Unquantised types by their own names: "auto" is the model's."""
    names = dict.fromkeys(dtype.removeprefix("auto, ") for dtype in dtypes)
    return ", ".join(f"`{name}`" for name in names)


def _span(table: Mapping[str, Any], releases: Sequence[str]) -> str:
    short = [release.rpartition(".")[0] for release in releases]
    whole = [release.rpartition(".")[0] for release in table["releases"]]
    first = whole.index(short[0])
    if len(short) > 1 and short == whole[first : first + len(short)]:
        return f"{short[0]}-{short[-1]}"
    return ", ".join(short)


def _when(table: Mapping[str, Any], releases: Sequence[str]) -> str:
    return "" if len(releases) == len(table["releases"]) else f" {_span(table, releases)}"


def text_of(table: Mapping[str, Any]) -> str:
    """The JSON as it is checked in."""
    return json.dumps(table, indent=1) + "\n"


def document(table: Mapping[str, Any], text: str) -> str:
    """The document with its table replaced.

    Raises:
        ValueError: it has no place for the table.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError("no place for the table")
    return f"{before}{begin}\n{render(table)}\n{end}{after}"


def main() -> int:
    """0 when both were written."""
    for release in RELEASES:
        if reason := missing(release):
            print(reason, file=sys.stderr)
            return 1
    table = table_of({release: scanned(release) for release in RELEASES})
    DATA.write_text(text_of(table))
    DOC.write_text(document(table, DOC.read_text()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
