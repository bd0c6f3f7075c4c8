"""What a request's parameters may say, and the digest of a prompt; needs no vLLM."""

from __future__ import annotations

import hashlib
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpd import RequestError
from kvpd.vllm.prompt import Media, digest
from kvpd.vllm.reference import Proof, publish, referred

GOOD: dict[str, Any] = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[4, 5, 6]],
    "remote_engine_id": "engine",
    "remote_request_id": "cmpl-1",
    "remote_host": "10.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
    "dcp_size": 1,
    "pp_size": 1,
    "remote_num_tokens": 48,
    "remote_blocks_expiry_time": None,
    "transfer_mode": "pull",
    "somebody_elses": {"key": 1},
}
# field -> values that no peer gives.
BAD: dict[str, list[Any]] = {
    "do_remote_prefill": ["yes", 1],
    "remote_block_ids": [None, [1, 2], [[1.0]], [[-1]], [["1"]], [[2**31]], "ids", [[1], None]],
    "remote_engine_id": [None, "", 5, ["engine"], "x" * 513],
    "remote_request_id": [None, ["a"], {}],
    "remote_host": [None, 5, ""],
    "remote_port": [None, 0, 65536, "5600", 5600.5, True],
    "tp_size": [None, 0, -1, 1025, "2"],
    "dcp_size": [2],
    "pp_size": [2, 0],
    "remote_num_tokens": [None, -1, "48", 1.5],
    "remote_blocks_expiry_time": ["soon", float("nan"), float("inf"), [1]],
    "remote_registration_generation": [-1, "1", 2**31],
    "transfer_mode": ["push", 1],
    "kvpd": [
        5,
        {"num_tokens": -1},
        {"num_tokens": 1, "prompt": "short"},
        {"num_tokens": 1, "request": "0" * 31},
        {"num_tokens": 1, "request": 5},
        {"prompt": "0" * 64},
    ],
}


def test_good_parameters() -> None:
    reference = referred(GOOD, reads_while_prefilling=False)
    assert reference is not None
    assert (reference.block_ids, reference.num_tokens) == (((4, 5, 6),), 48)
    assert reference.proof is None and reference.num_usable_tokens == 48


def test_what_a_proof_does_not_cover_is_not_used() -> None:
    """A token that the prefill sampled need not be the one that the request goes on with."""
    params: dict[str, Any] = dict(GOOD)
    publish(params, Proof(40, "0" * 64))
    reference = referred(params, reads_while_prefilling=False)
    assert reference is not None and reference.num_usable_tokens == 40
    assert reference.proof == Proof(40, "0" * 64)


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in BAD.items() for value in values]
)
def test_bad_parameters_are_refused_by_field(field: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        referred(GOOD | {field: value}, reads_while_prefilling=False)
    assert caught.value.code == "invalid-params"
    assert caught.value.field.startswith(f"kv_transfer_params.{field}")
    assert "pass on kv_transfer_params" in str(caught.value)


@pytest.mark.parametrize("params", ["soon", 5, [1], True, b"x"])
def test_parameters_that_are_no_map(params: object) -> None:
    with pytest.raises(RequestError) as caught:
        referred(params, reads_while_prefilling=False)
    assert (caught.value.code, caught.value.field) == ("invalid-params", "kv_transfer_params")


@pytest.mark.parametrize("field", sorted(set(GOOD) & set(BAD) - {"do_remote_prefill"}))
def test_a_missing_field_is_refused_unless_stock_may_leave_it_out(field: str) -> None:
    params = {key: value for key, value in GOOD.items() if key != field}
    optional = {"dcp_size", "pp_size", "remote_blocks_expiry_time", "transfer_mode"}
    if field in optional:
        assert referred(params, reads_while_prefilling=False) is not None
    else:
        with pytest.raises(RequestError):
            referred(params, reads_while_prefilling=False)


def test_who_reads_nothing_refers_to_nothing() -> None:
    for params in (None, {}, {"do_remote_decode": True}, GOOD | {"do_remote_prefill": False}):
        assert referred(params, reads_while_prefilling=False) is None
    turned = GOOD | {"do_remote_prefill": False, "do_remote_decode": True}
    assert referred(turned, reads_while_prefilling=False) is None
    assert referred(turned, reads_while_prefilling=True) is not None


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from(sorted(GOOD | BAD)), _json), st.booleans())
def test_whatever_they_are_nothing_else_is_raised(changes: dict[str, Any], reads: bool) -> None:
    try:
        referred(GOOD | changes, reads_while_prefilling=reads)
    except RequestError as error:
        assert error.code == "invalid-params"


def test_the_digest_is_what_its_definition_says() -> None:
    """Written out apart from the code: the parts, each behind its length."""
    parts = [
        struct.pack("<3I", 7, 8, 9),
        b"lora",
        b"image",
        b"abc",
        struct.pack("<2q", 1, 2),
    ]
    whole = b"kvpd prompt 1" + b"".join(struct.pack("<Q", len(p)) + p for p in parts)
    found = digest([7, 8, 9], [Media("image", "abc", 1, 2)], "lora")
    assert found == hashlib.sha256(whole).hexdigest()


def test_everything_that_decides_a_page_is_in_the_digest() -> None:
    media = Media("image", "abc", 1, 2)
    seen = {
        digest([7, 8, 9], [], ""),
        digest([7, 8], [], ""),
        digest([7, 9, 8], [], ""),
        digest([7, 8, 9], [], "lora"),
        digest([7, 8, 9], [media], ""),
        digest([7, 8, 9], [Media("image", "abd", 1, 2)], ""),
        digest([7, 8, 9], [Media("audio", "abc", 1, 2)], ""),
        digest([7, 8, 9], [Media("image", "abc", 0, 2)], ""),
        digest([7, 8, 9], [media, media], ""),
    }
    assert len(seen) == 9 and None not in seen


def test_media_without_a_hash_cannot_be_compared() -> None:
    assert digest([7], [Media("image", "", 0, 1)], "") is None
