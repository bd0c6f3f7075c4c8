"""``kvpd formats``: the cheat sheet and the pictures, against an oracle that reshapes arrays."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jsonschema
import numpy as np
import pytest

from kvpd.cli import main
from kvpd.cli.formats.drawing import drawing_of
from kvpd.cli.formats.known import KNOWN, Known
from kvpd.cli.formats.pieces import Fate, fate
from tests.make_schemas import FOLDER
from tests.oracle.pages import Spec, offsets

SHAPES = [
    # heads, tokens, head size, element type
    (2, 16, 16, "bfloat16"),
    (8, 16, 128, "float16"),
    (1, 32, 64, "float8_e4m3fn"),
    (3, 16, 8, "float32"),
]
FAMILIES = {
    "standard": ("standard", "HNC"),
    "standard-nhc": ("standard", "NHC"),
    "split-kv": ("split-kv", "HNC"),
    "split-kv-nhc": ("split-kv", "NHC"),
    "aiter-shuffle": ("aiter-shuffle", "tiled"),
    "aiter-shuffle-transposed": ("aiter-shuffle", "transposed"),
}


def spec_of(name: str, shape: tuple[int, int, int, str]) -> Spec:
    heads, tokens, head_dim, dtype = shape
    return Spec(*FAMILIES[name], heads, tokens, head_dim, dtype)


def valid_json(text: str, name: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(text)
    schema = json.loads((FOLDER / f"{name}.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(value, schema, jsonschema.Draft202012Validator)
    return value


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", list(FAMILIES))
def test_every_element_is_drawn_where_it_lies(name: str, shape: tuple[int, int, int, str]) -> None:
    spec = spec_of(name, shape)
    drawing = drawing_of([name], *shape, None)
    (format,) = drawing.formats
    size = spec.element_bytes
    num_drawn = 0
    for component, (plane, place) in offsets(spec).items():
        for head, token, channel in np.ndindex(place.shape):
            element = format.planes[plane][int(place[head, token, channel]) // size]
            assert element is not None
            assert (element.component, element.head, element.token, element.channel) == (
                component,
                head,
                token,
                channel,
            )
            num_drawn += 1
    assert num_drawn == sum(len(plane) for plane in format.planes)


@pytest.mark.parametrize("known", KNOWN, ids=lambda known: known.name)
def test_the_sheet_says_how_k_and_v_are_stored(known: Known) -> None:
    """The texts are read as array shapes, and offsets derived from them."""
    shape = (2, 16, 64, "bfloat16")
    found = offsets(spec_of(known.name, shape))
    for component, text in (("k", known.k), ("v", known.v)):
        _, place = found[component]
        for head, token, channel in ((0, 0, 0), (1, 5, 9), (0, 15, 63), (1, 8, 40)):
            expected = element_number(text, head, token, channel, *shape[:3])
            assert expected == place[head, token, channel] // 2, (component, head, token, channel)


def element_number(
    text: str, head: int, token: int, channel: int, heads: int, tokens: int, head_dim: int
) -> int:
    """The number of an element in the array that the text describes; elements of two bytes."""
    x = 8
    match = re.fullmatch(r"\[(.+)\](?:, (first|last) D)?", text)
    assert match is not None
    axes, half = match[1].split(", "), match[2]
    inner = channel % x if "D/x" in axes else token % x
    places = {
        "H": (head, heads),
        "N": (token, tokens),
        "D": (channel, head_dim),
        "D/x": (channel // x, head_dim // x),
        "N/x": (token // x, tokens // x),
        "x": (inner, x),
        "2*D": (channel + (head_dim if half == "last" else 0), 2 * head_dim),
    }
    number = 0
    for axis in axes:
        coordinate, extent = places[axis]
        number = number * extent + coordinate
    return number


def test_goldens_are_followed(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["formats", "show", "standard", "aiter-shuffle"]
    big = ["--heads", "8", "--tokens", "16", "--head-dim", "128"]
    for element, shape, numbers in (
        ("k,1,5,9", [], (681, 425)),
        ("v,1,5,9", [], (697, 333)),
        ("k,7,5,9", big, (29961, 14505)),
        ("v,7,5,9", big, (30089, 14413)),
    ):
        assert main([*arguments, *shape, "--element", element, "--json"]) == 0
        text = capsys.readouterr().out
        # The large page has a hundred thousand values, which the validator takes a minute for.
        shown = json.loads(text) if shape else valid_json(text, "formats-show")
        assert [format["followed"]["number"] for format in shown["formats"]] == list(numbers)
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "element 681\n" in text
    assert "element 425\n" in text


@pytest.mark.parametrize("shape", SHAPES)
def test_k_moves_in_whole_pieces_and_v_is_transposed(shape: tuple[int, int, int, str]) -> None:
    """The one thing to know about the shuffle, counted from what is drawn."""
    drawing = drawing_of(["standard", "aiter-shuffle"], *shape, None)
    x = drawing.piece_elements
    heads, tokens, head_dim, _ = shape
    num_pieces = heads * tokens * head_dim // x
    standard, shuffled = drawing.formats
    k, v = (fate(standard, shuffled, component, x) for component in ("k", "v"))
    assert k == Fate(num_whole=num_pieces, num_pieces=num_pieces, spread=1)
    assert v == Fate(num_whole=0, num_pieces=num_pieces, spread=x)


def test_the_picture_has_a_cell_for_every_element(tmp_path: Path) -> None:
    target = tmp_path / "pages.svg"
    assert main(["formats", "show", "standard", "aiter-shuffle", "--svg", str(target)]) == 0
    space = "{http://www.w3.org/2000/svg}"
    root = ElementTree.parse(target).getroot()
    titles = [title.text or "" for title in root.iter(f"{space}title")]
    expected = []
    for name in ("standard", "aiter-shuffle"):
        found = offsets(spec_of(name, SHAPES[0]))
        for component, (plane, place) in found.items():
            for head, token, channel in np.ndindex(place.shape):
                byte = int(place[head, token, channel])
                expected.append(
                    f"element {byte // 2}, byte {byte}: "
                    f"{component.upper()}(h={head}, n={token}, d={channel})"
                )
                assert plane in (0, 1)
    assert sorted(titles) == sorted(expected)
    fills = {rect.get("fill") for rect in root.iter(f"{space}rect")} - {None}
    assert len(fills) == 1 + 4, "background, K and V, each with a marked tile"
    outlined = [rect for rect in root.iter(f"{space}rect") if rect.get("class") == "followed"]
    assert len(outlined) == 2


def test_the_sheet(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["formats"]) == 0
    text = capsys.readouterr().out
    assert main(["formats", "--json"]) == 0
    rows = valid_json(capsys.readouterr().out, "formats")["formats"]
    assert [row["name"] for row in rows] == list(FAMILIES)
    assert [row["planes"] for row in rows] == [1, 1, 2, 2, 2, 2]
    assert all(row["name"] in text and row["k"] in text for row in rows)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dtype", "int3"], 'dtype is "int3"'),
        (["--head-dim", "12"], "head_dim is 12; expected a multiple of 8"),
        (["--heads", "0"], "heads is 0"),
        (["--heads", "4096"], "too large to draw"),
        (["--element", "k,2,0,0"], "head is 2; expected below 2"),
        (["--svg", "/nonexistent/x.svg"], "/nonexistent/x.svg: No such file or directory"),
    ],
)
def test_what_cannot_be_drawn(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["formats", "show", "aiter-shuffle", *arguments]) == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert shown.err.count("\n") == 1
    assert shown.out == ""
