"""The golden vectors and a hypothesis oracle, through the bindings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvpd
from tests.oracle.make_vectors import SHAPES, VARIANTS
from tests.oracle.pages import Spec, digest, offsets

VECTORS = json.loads((Path(__file__).parent / "vectors" / "formats.json").read_text())


def page_format(spec: Spec) -> kvpd.PageFormat:
    """The format that kvpd builds for a spec of the oracle."""
    extents: dict[str, Any] = {
        "heads": spec.heads,
        "tokens": spec.tokens,
        "head_dim": spec.head_dim,
        "dtype": spec.dtype,
    }
    variant: Any = spec.variant
    if spec.family == "standard":
        return kvpd.PageFormat.standard(**extents, interior=variant)
    if spec.family == "split-kv":
        return kvpd.PageFormat.split_kv(**extents, interior=variant)
    return kvpd.PageFormat.aiter_shuffle(**extents, v=variant)


def spec_of(vector: dict[str, Any]) -> Spec:
    names = ("family", "variant", "heads", "tokens", "head_dim", "dtype")
    return Spec(**{name: vector[name] for name in names})


@pytest.mark.parametrize(
    "vector", VECTORS, ids=lambda vector: "{family}-{variant}-{dtype}".format(**vector)
)
def test_golden_vectors(vector: dict[str, Any]) -> None:
    format = page_format(spec_of(vector))
    assert format.digest == vector["digest"]
    for element in vector["elements"]:
        found = format.offset(element["component"], *element["at"])
        assert found == (element["plane"], element["offset_bytes"])


def test_the_vectors_are_the_oracles() -> None:
    """The file on disk is what the oracle says today, for every shape and variant."""
    assert len(VECTORS) == len(SHAPES) * len(VARIANTS)
    for vector in VECTORS:
        assert vector["digest"] == digest(spec_of(vector))


SPECS = st.builds(
    lambda variant, heads, n, d, dtype: Spec(variant[0], variant[1], heads, 16 * n, 16 * d, dtype),
    st.sampled_from(VARIANTS),
    st.integers(1, 6),
    st.integers(1, 3),
    st.integers(1, 4),
    st.sampled_from(["bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e4m3fnuz"]),
)


@given(SPECS)
def test_every_offset_matches_the_oracle(spec: Spec) -> None:
    format = page_format(spec)
    for name, (plane, expected) in offsets(spec).items():
        (component,) = [part for part in format.components if part.name == name]
        assert component.plane == plane
        head, token, channel = np.indices(expected.shape)
        found = (
            component.base_bytes
            + head * component.head_stride_bytes
            + token // component.token_tile * component.token_tile_stride_bytes
            + token % component.token_tile * component.token_stride_bytes
            + channel // component.channel_tile * component.channel_tile_stride_bytes
            + channel % component.channel_tile * component.channel_stride_bytes
        )
        np.testing.assert_array_equal(found, expected)
        last = (spec.heads - 1, spec.tokens - 1, spec.head_dim - 1)
        assert format.offset(name, *last) == (plane, int(expected[last]))
    assert format.digest == digest(spec)


@given(SPECS)
def test_a_format_survives_its_own_components(spec: Spec) -> None:
    format = page_format(spec)
    again = kvpd.PageFormat.from_components("any name", format.components, format.plane_bytes)
    assert (again, hash(again), again.digest, again.name) == (
        format,
        hash(format),
        format.digest,
        format.name,
    )


def test_goldens() -> None:
    """Element offsets inside one block, packed page to its own planes."""
    for extents, at, k, v in (
        ((2, 16, 16), (1, 5, 9), (681, 425), (697, 333)),
        ((8, 16, 128), (7, 5, 9), (29961, 14505), (30089, 14413)),
    ):
        heads, tokens, head_dim = extents
        shape: dict[str, Any] = {
            "heads": heads,
            "tokens": tokens,
            "head_dim": head_dim,
            "dtype": "bfloat16",
        }
        packed = kvpd.PageFormat.standard(**shape)
        shuffled = kvpd.PageFormat.aiter_shuffle(**shape)
        for name, (before, after), plane in (("k", k, 0), ("v", v, 1)):
            assert packed.offset(name, *at) == (0, 2 * before)
            assert shuffled.offset(name, *at) == (plane, 2 * after)
            last = (heads - 1, tokens - 1, head_dim - 1)
            end = 2 * (heads * tokens * head_dim - 1)
            assert shuffled.offset(name, *last) == (plane, end)


def test_torch_dtypes_are_accepted() -> None:
    torch = pytest.importorskip("torch")
    by_name = kvpd.PageFormat.standard(heads=2, tokens=16, head_dim=64, dtype="float8_e4m3fnuz")
    by_dtype = kvpd.PageFormat.standard(
        heads=2, tokens=16, head_dim=64, dtype=torch.float8_e4m3fnuz
    )
    assert by_name == by_dtype


@pytest.mark.parametrize(
    ("change", "code", "field"),
    [
        ({"heads": 0}, "extent", "heads"),
        ({"tokens": 1 << 40}, "extent", "tokens"),
        ({"dtype": "int3"}, "unknown-element-type", "dtype"),
        ({"head_dim": 60}, "not-divisible", "head_dim"),
        ({"tokens": 12}, "not-divisible", "tokens"),
        ({"v": "folded"}, "unknown-word", "v"),
        ({"heads": 60000, "tokens": 60000}, "page-bytes", "plane_bytes"),
    ],
)
def test_bad_parameters_are_typed_errors(change: dict[str, Any], code: str, field: str) -> None:
    shape: dict[str, Any] = {"heads": 2, "tokens": 16, "head_dim": 64, "dtype": "bfloat16"}
    with pytest.raises(kvpd.FormatError) as error:
        kvpd.PageFormat.aiter_shuffle(**(shape | change))
    assert (error.value.code, error.value.field) == (code, field)
    assert error.value.got and error.value.expected and field in str(error.value)
    assert isinstance(error.value, kvpd.KvpdError) and isinstance(error.value, ValueError)


def test_formats_are_immutable() -> None:
    format = kvpd.PageFormat.standard(heads=2, tokens=16, head_dim=64, dtype="bfloat16")
    with pytest.raises(AttributeError):
        format.name = "other"  # type: ignore[misc]
