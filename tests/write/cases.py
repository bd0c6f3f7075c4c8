"""The matrix of writes, and the one check every implementation must pass on every case."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from kvpd.convert import Pages
from kvpd.write import Norm, Rotation, Scales, Writer, WriteTuning
from tests.convert.caches import Cache, Holding, make_cache, page_format
from tests.convert.slot_writer import UNSIGNED, put_token
from tests.oracle.pages import Spec
from tests.write import oracle

Prepare = Callable[[Pages, int, WriteTuning | None], Writer]
# scattered: as decoding requests. chunk: a prompt's slots in order, beginning inside a page.
# mixed: both, with padding between.
Slots = Literal["scattered", "chunk", "mixed"]
# So that some values are beyond an 8-bit float.
KEY_SCALE, VALUE_SCALE, QUERY_SCALE = 0.37, 0.005, 0.004
EPSILON = 1e-6
NUM_POSITIONS = 64


@dataclass(frozen=True)
class Case:
    """One call.

    Attributes:
        spec: the pages.
        holding: how memory holds them.
        slots: where the batch goes.
        num_rows: tokens; the last `num_unslotted` have no slot, as a padded batch's.
        query_heads: 0 for a call without Q.
        rotary_dim: 0 for a write alone.
        query_dtype: of Q's output, where it is not in place.
        tuning: how the kernel cuts the batch; None leaves it to the number of rows.
    """

    spec: Spec
    holding: Holding = "planes"
    slots: Slots = "scattered"
    num_rows: int = 9
    num_unslotted: int = 0
    query_heads: int = 4
    rotary_dim: int = 0
    is_neox: bool = True
    has_norm: bool = False
    in_place: bool = True
    query_dtype: str = ""
    dtype: str = "bfloat16"
    slot_dtype: torch.dtype = torch.int64
    tuning: WriteTuning | None = None

    def __str__(self) -> str:
        spec, tuning = self.spec, self.tuning
        words = [
            f"{spec.family}.{spec.variant}-H{spec.heads}N{spec.tokens}D{spec.head_dim}",
            f"{self.dtype}-to-{spec.dtype}-{self.holding}-{self.slots}-T{self.num_rows}",
            f"Q{self.query_heads}-rot{self.rotary_dim}{'neox' if self.is_neox else 'gptj'}",
            "norm" if self.has_norm else "",
            "in-place" if self.in_place else f"out{self.query_dtype}",
            "" if tuning is None else f"{tuning.num_rows}x{tuning.num_heads}w{tuning.num_warps}",
        ]
        return "-".join(word for word in words if word)


FEW = WriteTuning(1, 2, 1)
MANY = WriteTuning(16, 1, 4)
WIDE = WriteTuning(32, 4, 4)


def _spec(family: str, variant: str, heads: int, tokens: int, dim: int, dtype: str) -> Spec:
    return Spec(family, variant, heads, tokens, dim, dtype)


def default_matrix() -> Iterator[Case]:
    """Every format, job, kind of rotation, element type and order of slots, each at least once."""
    tiled = _spec("aiter-shuffle", "tiled", 2, 16, 64, "bfloat16")
    fp8 = _spec("aiter-shuffle", "tiled", 2, 32, 64, "float8_e4m3fn")
    fnuz = _spec("aiter-shuffle", "tiled", 2, 16, 64, "float8_e4m3fnuz")
    formats: list[tuple[Spec, Holding]] = [
        (tiled, "planes"),
        (_spec("aiter-shuffle", "transposed", 2, 16, 64, "bfloat16"), "joint"),
        (_spec("standard", "HNC", 2, 16, 64, "bfloat16"), "heads"),
        (_spec("standard", "HNC", 2, 16, 64, "bfloat16"), "interleaved"),
        (_spec("standard", "NHC", 2, 16, 64, "bfloat16"), "joint"),
        (_spec("split-kv", "HNC", 2, 16, 64, "bfloat16"), "joint"),
        (_spec("split-kv", "NHC", 2, 16, 64, "bfloat16"), "planes"),
        (fp8, "joint"),
        (fnuz, "planes"),
    ]
    for spec, holding in formats:
        yield Case(spec, holding, "scattered", tuning=FEW)
        yield Case(spec, holding, "mixed", 45, tuning=MANY, slot_dtype=torch.int32)
        yield Case(spec, holding, "mixed", 45, rotary_dim=64, tuning=MANY, num_unslotted=3)
        yield Case(spec, holding, rotary_dim=64, has_norm=True, in_place=False, tuning=FEW)
    for slots in ("scattered", "chunk", "mixed"):
        yield Case(tiled, "joint", slots, 70, tuning=WIDE)
        yield Case(fp8, "joint", slots, 70, tuning=WIDE)
    # Partial rotation, the other pairs, GQA of odd counts, heads that are no power of two.
    odd = _spec("aiter-shuffle", "tiled", 3, 16, 96, "float16")
    small = _spec("aiter-shuffle", "transposed", 5, 16, 80, "bfloat16")
    for is_neox in (True, False):
        for tuning in (FEW, MANY):
            yield Case(tiled, rotary_dim=32, is_neox=is_neox, tuning=tuning)
            yield Case(
                odd, query_heads=6, rotary_dim=96, is_neox=is_neox, dtype="float16", tuning=tuning
            )
            yield Case(
                small,
                query_heads=5,
                rotary_dim=20,
                is_neox=is_neox,
                has_norm=True,
                in_place=False,
                tuning=tuning,
            )
    yield Case(tiled, rotary_dim=64, has_norm=True, in_place=True, tuning=MANY)
    yield Case(tiled, rotary_dim=64, query_heads=0, tuning=FEW)
    yield Case(tiled, rotary_dim=64, in_place=False, query_dtype="float8_e4m3fn", tuning=FEW)
    yield Case(fnuz, rotary_dim=64, in_place=False, query_dtype="float8_e4m3fnuz", tuning=MANY)
    yield Case(
        _spec("aiter-shuffle", "tiled", 1, 16, 256, "bfloat16"), rotary_dim=256, has_norm=True
    )


def check(case: Case, prepare: Prepare, *, device: str = "cpu", seed: int = 0) -> None:
    """Write a batch; Q, K and every byte of all memory must be as expected."""
    setup = set_up(case, device=device, seed=seed)
    before = setup.cache.memory.clone()
    writer = prepare(setup.cache.pages, 1, case.tuning)
    writer(setup.key, setup.value, setup.slots, **setup.arguments)
    if device != "cpu":
        torch.cuda.synchronize()
    assert not torch.equal(before, setup.cache.memory), "nothing was written"
    wrong = setup.cache.differing()
    assert wrong.size == 0, f"{wrong.size} bytes of the pages differ, first at {wrong[:8]}"
    for name, (got, expected) in setup.expected.items():
        same = torch.equal(_bits(got.cpu()), _bits(expected))
        assert same, f"{name}: {(got.cpu().float() != expected.float()).sum()} elements differ"


@dataclass
class SetUp:
    """A call, and what must be there after it: the cache's image, and tensors by name."""

    cache: Cache
    key: torch.Tensor
    value: torch.Tensor
    slots: torch.Tensor
    arguments: dict[str, Any]
    expected: dict[str, tuple[torch.Tensor, torch.Tensor]]


def set_up(case: Case, *, device: str = "cpu", seed: int = 0) -> SetUp:
    """A poisoned cache and a batch; outputs begin as poison too, with guards between the rows."""
    rng = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    spec, dtype = case.spec, getattr(torch, case.dtype)
    heads = (case.query_heads, spec.heads, spec.heads)
    num_blocks = case.num_rows // spec.tokens + 4
    if case.slots == "scattered":
        num_blocks = max(num_blocks, 6)
    cache = make_cache(
        rng,
        page_format(spec),
        holding=case.holding,
        num_layers=2,
        num_blocks=num_blocks,
        gap_bytes=48,
        device=device,
    )

    def numbers(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator).to(dtype)

    # Sixteen channels between two tokens belong to nobody.
    rows = numbers(case.num_rows, sum(heads) * spec.head_dim + 16)
    parts = _parts(rows, heads, spec.head_dim)
    slots = _slots(rng, case, num_blocks)
    query, key, value = parts
    cos_sin = numbers(NUM_POSITIONS, case.rotary_dim)
    positions = torch.randint(0, NUM_POSITIONS, (case.num_rows,), generator=generator)
    weights = numbers(spec.head_dim), numbers(spec.head_dim)
    turned = [query, key]
    if case.rotary_dim:
        if case.has_norm:
            pairs = zip(turned, weights, strict=True)
            turned = [oracle.rms_norm(part, weight, EPSILON) for part, weight in pairs]
        turned = [oracle.rotated(part, positions, cos_sin, is_neox=case.is_neox) for part in turned]
    _write(case, cache, turned[1], value, slots)
    on_device = rows.to(device)
    arguments, expected = _arguments(case, on_device, heads, turned, generator)
    if case.rotary_dim:
        arguments["rotation"] = Rotation(positions.to(device), cos_sin.to(device), case.is_neox)
        if case.has_norm:
            arguments["norm"] = Norm(weights[0].to(device), weights[1].to(device), EPSILON)
    arguments["scales"] = Scales(
        *(torch.tensor([scale], device=device) for scale in (KEY_SCALE, VALUE_SCALE, QUERY_SCALE))
    )
    if not case.rotary_dim or not case.in_place:
        expected["rows"] = (on_device, rows)
    own = _parts(on_device, heads, spec.head_dim)
    placed = torch.from_numpy(slots).to(case.slot_dtype).to(device)
    return SetUp(cache, own[1], own[2], placed, arguments, expected)


def _arguments(
    case: Case,
    rows: torch.Tensor,
    heads: tuple[int, int, int],
    turned: list[torch.Tensor],
    generator: torch.Generator,
) -> tuple[dict[str, Any], dict[str, tuple[torch.Tensor, torch.Tensor]]]:
    """Q and outputs of a call, and what they must become."""
    query, key, _ = _parts(rows, heads, case.spec.head_dim)
    if not case.rotary_dim:
        return {}, {}
    arguments: dict[str, Any] = {}
    expected = {"key": (key, turned[1])}
    if case.query_heads:
        arguments["query"] = query
        expected["query"] = (query, turned[0])
    if case.in_place:
        return arguments, expected

    def poison(like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        shape = (*like.shape[:-1], like.shape[-1] * dtype.itemsize)
        drawn = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        return drawn.view(dtype).to(rows.device)

    arguments["key_out"] = poison(key, key.dtype)
    expected["key"] = (arguments["key_out"], turned[1])
    if case.query_heads:
        wanted = turned[0]
        if case.query_dtype:
            narrow = getattr(torch, case.query_dtype)
            wanted = oracle.query_quantised(wanted, QUERY_SCALE, narrow)
        arguments["query_out"] = poison(query, wanted.dtype)
        expected["query"] = (arguments["query_out"], wanted)
    return arguments, expected


def _write(
    case: Case, cache: Cache, key: torch.Tensor, value: torch.Tensor, slots: NDArray[Any]
) -> None:
    """Into the image, token by token."""
    spec = case.spec
    kept = getattr(torch, spec.dtype)
    if spec.element_bytes == 1:
        key = oracle.divided(key, KEY_SCALE, kept)
        value = oracle.divided(value, VALUE_SCALE, kept)
    unsigned = UNSIGNED[spec.element_bytes]
    bits = [
        part.contiguous().view(torch.uint8).numpy().view(unsigned).reshape(part.shape)
        for part in (key, value)
    ]
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            block, n = divmod(slot, spec.tokens)
            page = cache.read(1, block).view(unsigned)
            put_token(spec, page, n, bits[0][row], bits[1][row])
            cache.write(1, block, page.view(np.uint8))


def _slots(rng: np.random.Generator, case: Case, num_blocks: int) -> NDArray[np.int64]:
    tokens, count = case.spec.tokens, case.num_rows - case.num_unslotted
    blocks = rng.permutation(num_blocks)
    in_order = (blocks[:, None] * tokens + np.arange(tokens)).reshape(-1)
    if case.slots == "scattered":
        slots = rng.permutation(num_blocks * tokens)[:count]
        slots[1::4] = -1
        return slots
    slots = in_order[3 : 3 + count].copy()
    if case.slots == "mixed":
        # A request's single token, padding inside a vector of tokens, and two rows out of order.
        slots[0], slots[count // 2] = in_order[-1], -1
        slots[[-1, -2]] = slots[[-2, -1]]
    return slots


def _parts(rows: torch.Tensor, heads: tuple[int, int, int], dim: int) -> list[torch.Tensor]:
    """Q, K and V as views of [rows, heads, D]."""
    found, start = [], 0
    for number in heads:
        found.append(rows[:, start : start + number * dim].unflatten(-1, (number, dim)))
        start += number * dim
    return found


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)
