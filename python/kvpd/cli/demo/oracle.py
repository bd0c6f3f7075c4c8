"""What the caches must hold, without any of kvpd's strides: numpy reshapes from the tokens.

Nothing here imports the core or `kvpd.convert`. If both sides computed an offset with the same
formula, a wrong formula would pass the check.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvpd.cli.demo.scenario import DECODE_POISON, PREFILL_POISON, Scenario

Array = np.ndarray[Any, np.dtype[Any]]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]

GUARD_BYTES = 4096


def key_values(scenario: Scenario, token_ids: Array, layer: int) -> tuple[Array, Array]:
    """K and V of a request's tokens in one layer, each [T, H, D] of raw elements.

    Every element depends on token, position, layer, K or V, head and channel, so that an element
    in a wrong place has a wrong value (but for chance).
    """
    position = np.arange(len(token_ids), dtype=np.uint32)
    token = _mix(token_ids.astype(np.uint32) * np.uint32(2654435761) ^ _mix(position))
    num_elements = scenario.heads * scenario.head_dim
    element = np.arange(2 * num_elements, dtype=np.uint32)
    place = _mix(element ^ _mix(np.array([layer * 2 + 1], dtype=np.uint32)))
    kind = {1: np.uint8, 2: np.uint16, 4: np.uint32}[scenario.element_bytes]
    values = _mix(token[:, None] ^ place[None, :]).astype(kind)
    shape = (len(token_ids), scenario.heads, scenario.head_dim)
    return (
        values[:, :num_elements].reshape(shape),
        values[:, num_elements:].reshape(shape),
    )


def pages(scenario: Scenario, token_ids: Array, layer: int) -> tuple[Array, Array]:
    """K and V cut into pages [P, N, H, D]; slots without a token hold the prefill's poison."""
    k, v = key_values(scenario, token_ids, layer)
    num_pages = -(-len(token_ids) // scenario.tokens)
    return _paged(scenario, k, num_pages), _paged(scenario, v, num_pages)


def standard_pages(k: Array, v: Array) -> Bytes:
    """[P, page bytes] of standard pages [H, N, K then V] from K and V [P, N, H, D]."""
    return _flat(np.concatenate([k, v], axis=3).transpose(0, 2, 1, 3))


def shuffled_planes(k: Array, v: Array) -> tuple[Bytes, Bytes]:
    """K plane [H, D/x, N, x] and V plane [H, N/x, D, x], each [P, plane bytes], x = 16 bytes."""
    num_pages, tokens, heads, channels = k.shape
    x = 16 // k.itemsize
    k_tiles = k.reshape(num_pages, tokens, heads, channels // x, x)
    v_tiles = v.reshape(num_pages, tokens // x, x, heads, channels)
    return _flat(k_tiles.transpose(0, 2, 3, 1, 4)), _flat(v_tiles.transpose(0, 3, 1, 4, 2))


@dataclass(frozen=True)
class DecodeMap:
    """Where the planes lie in the decoder's memory: guards around each, K then V of every layer."""

    scenario: Scenario

    @property
    def plane_bytes(self) -> int:
        """Bytes of the K, or V, plane of one block."""
        s = self.scenario
        return s.heads * s.tokens * s.head_dim * s.element_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole memory; every plane is followed by a guard, the first led by one."""
        return self.start(self.scenario.layers, 0)

    def start(self, layer: int, plane: int) -> int:
        """First byte of block 0 of a plane; the end of the memory for one layer too many."""
        each = self.plane_bytes * self.scenario.decode_blocks + GUARD_BYTES
        return GUARD_BYTES + (2 * layer + plane) * each

    def locate(self, byte: int) -> str:
        """Where a byte of the memory lies, in words."""
        each = self.plane_bytes * self.scenario.decode_blocks + GUARD_BYTES
        index, inside = divmod(byte - GUARD_BYTES, each)
        block, offset = divmod(inside, self.plane_bytes)
        if byte < GUARD_BYTES or block >= self.scenario.decode_blocks:
            return f"byte {byte}: guard"
        plane = "KV"[index % 2]
        return f"byte {byte}: layer {index // 2}, {plane} plane, block {block}, byte {offset}"


def expected_decode_memory(
    scenario: Scenario, decode_ids: dict[str, list[int]]
) -> Iterator[tuple[int, Bytes]]:
    """The decoder's memory after all requests, in pieces that tile it: (first byte, bytes)."""
    where = DecodeMap(scenario)
    guard = np.full(GUARD_BYTES, DECODE_POISON, dtype=np.uint8)
    yield 0, guard
    for layer in range(scenario.layers):
        shape = (2, scenario.decode_blocks, where.plane_bytes)
        planes = np.full(shape, DECODE_POISON, dtype=np.uint8)
        for request_id, ids in decode_ids.items():
            k, v = pages(scenario, scenario.token_ids(request_id), layer)
            planes[0, ids], planes[1, ids] = shuffled_planes(k, v)
        for plane in range(2):
            start = where.start(layer, plane)
            yield start, planes[plane].reshape(-1)
            yield start + planes[plane].size, guard


@dataclass(frozen=True)
class Comparison:
    """The whole memory against what it must be.

    Attributes:
        num_bytes: bytes compared.
        num_wrong: bytes that differ.
        first_wrong: where the first of them is, in words; "" if none.
    """

    num_bytes: int
    num_wrong: int
    first_wrong: str

    @property
    def holds(self) -> bool:
        """Whether every byte is right."""
        return self.num_wrong == 0


def compare(memory: Bytes, scenario: Scenario, decode_ids: dict[str, list[int]]) -> Comparison:
    """Compare every byte of the decoder's memory: pages, unused blocks, and guards."""
    where = DecodeMap(scenario)
    position = num_wrong = 0
    first_wrong = ""
    for start, expected in expected_decode_memory(scenario, decode_ids):
        if start != position:
            raise AssertionError(f"the oracle left a hole at byte {position}")
        position = start + expected.size
        wrong = np.flatnonzero(memory[start:position] != expected)
        num_wrong += wrong.size
        if wrong.size and not first_wrong:
            at = start + int(wrong[0])
            got, want = memory[at], expected[wrong[0]]
            first_wrong = f"{where.locate(at)} is 0x{got:02x}, expected 0x{want:02x}"
    if position != memory.size:
        raise AssertionError(f"the oracle covers {position} of {memory.size} bytes")
    return Comparison(position, num_wrong, first_wrong)


def _paged(scenario: Scenario, values: Array, num_pages: int) -> Array:
    shape = (num_pages * scenario.tokens, scenario.heads, scenario.head_dim)
    padded = np.empty(shape, dtype=values.dtype)
    padded.view(np.uint8)[...] = PREFILL_POISON
    padded[: len(values)] = values
    return padded.reshape(num_pages, scenario.tokens, *shape[1:])


def _flat(pages: Array) -> Bytes:
    return np.ascontiguousarray(pages).reshape(len(pages), -1).view(np.uint8)


def _mix(value: Array) -> Array:
    """A bijection of 32-bit integers in which every output bit depends on every input bit."""
    mixed: Array = value ^ (value >> np.uint32(16))
    mixed = mixed * np.uint32(0x7FEB352D)
    mixed = mixed ^ (mixed >> np.uint32(15))
    mixed = mixed * np.uint32(0x846CA68B)
    mixed ^= mixed >> np.uint32(16)
    return mixed
