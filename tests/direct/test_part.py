"""The part of the handshake: it travels, old readers skip it, hostile values are `WireError`s."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpd import wire
from kvpd.direct.part import RUNTIME, DirectPart, HostIdentity, check_same_host
from kvpd.errors import DirectError, WireError
from tests.engine_builder import engine
from tests.test_wire import packed, set_at, unpacked

HOST = HostIdentity(
    boot_id="12345678-9abc-4def-8123-456789abcdef",
    pid_namespace=4026531836,
    network_namespace=4026531833,
    user_namespace=4026531837,
    ipc_namespace=4026531839,
    pid=4711,
)
PART = DirectPart(
    runtime=RUNTIME,
    host=HOST,
    device_uuid="GPU-01234567-89ab-cdef-0123-456789abcdef",
    endpoint="kvpd-direct-" + "0123456789abcdef" * 2,
)


def handshake(part: DirectPart | None = PART) -> wire.Handshake:
    return wire.Handshake("engine-7", engine(), b"nixl", part)


def body() -> dict[str, Any]:
    return unpacked(wire.encode(handshake()))


def test_what_goes_in_comes_out() -> None:
    got = wire.decode(wire.encode(handshake()))
    assert got is not None
    assert got.direct == PART


def test_without_an_offer_the_bytes_are_those_of_a_handshake_that_knows_none() -> None:
    sent = unpacked(wire.encode(handshake(None)))
    assert sorted(sent) == ["engine_id", "facts", "formats", "nixl_metadata", "regions"]
    got = wire.decode(packed(sent))
    assert got is not None and got.direct is None


def test_a_reader_that_knows_no_such_part_skips_it() -> None:
    class Old(msgspec.Struct):
        engine_id: str
        nixl_metadata: bytes

    old = msgspec.convert(body(), Old)
    assert (old.engine_id, old.nixl_metadata) == ("engine-7", b"nixl")


def test_fields_of_a_later_release_are_skipped() -> None:
    sent = body()
    sent["direct"]["later"] = [1]
    sent["direct"]["host"]["later"] = {}
    got = wire.decode(packed(sent))
    assert got is not None and got.direct == PART


WRONG: list[tuple[str, Any]] = [
    ("direct", 1),
    ("direct", {}),
    ("direct", [1, 2]),
    ("direct.runtime", "x" * 65),
    ("direct.runtime", "cuda\n"),
    ("direct.runtime", ""),
    ("direct.host", None),
    ("direct.host.boot_id", "not one word"),
    ("direct.host.boot_id", HOST.boot_id + "\n"),
    ("direct.host.boot_id", "a" * 100_000),
    ("direct.host.pid", 0),
    ("direct.host.pid", -1),
    ("direct.host.pid", 2**31),
    ("direct.host.pid", "4711"),
    ("direct.host.pid_namespace", 0),
    ("direct.host.ipc_namespace", 2**63),
    ("direct.host.user_namespace", 2**64 - 1),
    ("direct.host.network_namespace", 1.5),
    ("direct.device_uuid", ""),
    ("direct.device_uuid", "GPU-\u00e9"),
    ("direct.endpoint", "kvpd-direct-\0"),
    ("direct.endpoint", "0" * 65),
    ("direct.endpoint", b"kvpd-direct-" + b"0" * 32),
]


@pytest.mark.parametrize(
    ("path", "new"),
    [("runtime", "cuda-vmm"), ("device_uuid", "UUID/7"), ("endpoint", "elsewhere:1")],
)
def test_words_of_a_later_release_cost_direct_placement_only(path: str, new: str) -> None:
    got = wire.decode(packed(set_at(body(), f"direct.{path}", new)))
    assert got is not None and got.direct is not None
    assert getattr(got.direct, path) == new


@pytest.mark.parametrize("path, new", WRONG, ids=lambda value: repr(value)[:40])
def test_hostile_values_are_wire_errors(path: str, new: Any) -> None:
    with pytest.raises(WireError) as caught:
        wire.decode(packed(set_at(body(), path, new)))
    assert caught.value.code == "invalid-field"
    assert path.split(".")[-1] in caught.value.field


@pytest.mark.parametrize("path", ["host", "runtime", "device_uuid", "endpoint", "host.pid"])
def test_every_field_is_needed(path: str) -> None:
    sent = body()
    *parents, last = path.split(".")
    node = sent["direct"]
    for parent in parents:
        node = node[parent]
    del node[last]
    with pytest.raises(WireError):
        wire.decode(packed(sent))


leaf = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text() | st.binary()
PATHS = ["direct", *(f"direct.{field}" for field in ("runtime", "host", "device_uuid", "endpoint"))]
PATHS += [f"direct.host.{field}" for field in HostIdentity.__struct_fields__]


@given(st.sampled_from(PATHS), leaf)
def test_any_value_anywhere_is_a_part_or_a_wire_error(path: str, new: Any) -> None:
    try:
        got = wire.decode(packed(set_at(body(), path, new)))
    except WireError as error:
        assert error.code and error.field
    else:
        assert got is not None
        again = wire.decode(wire.encode(got))
        assert again is not None and again.direct == got.direct


def test_the_identity_of_this_process_is_what_the_kernel_says() -> None:
    found = HostIdentity.of_this_process()
    assert found.boot_id == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    names = {"pid": "pid", "network": "net", "user": "user", "ipc": "ipc"}
    for field, name in names.items():
        link = os.readlink(f"/proc/self/ns/{name}")
        assert link == f"{name}:[{getattr(found, field + '_namespace')}]"
    assert found.pid == os.getpid()


def test_the_same_host_and_another_process_is_accepted() -> None:
    check_same_host(HOST, msgspec.structs.replace(HOST, pid=4712))


@pytest.mark.parametrize(
    "field", [name for name in HostIdentity.__struct_fields__ if name != "pid"]
)
def test_a_difference_in_any_name_space_or_boot_is_another_host(field: str) -> None:
    other: Any = "0" + HOST.boot_id[1:] if field == "boot_id" else getattr(HOST, field) + 1
    theirs = msgspec.structs.replace(HOST, pid=4712, **{field: other})
    with pytest.raises(DirectError) as caught:
        check_same_host(theirs, HOST)
    assert (caught.value.code, caught.value.field) == ("other-host", field)
    assert (caught.value.got, caught.value.expected) == (str(other), str(getattr(HOST, field)))


def test_our_own_offer_is_refused() -> None:
    with pytest.raises(DirectError) as caught:
        check_same_host(HOST, HOST)
    assert caught.value.code == "same-process"
