"""The matrix of conversions, and the one check every implementation must pass on every case."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch

from kvpd.convert import Conversion, Pages
from tests.convert.caches import Cache, Holding, make_cache, page_format
from tests.convert.slot_writer import random_tokens, write_page
from tests.oracle.pages import Spec

Prepare = Callable[[Pages, Pages], Conversion]


@dataclass(frozen=True)
class Case:
    """One conversion: a pair of formats, how memory holds them, and the ids."""

    source: Spec
    target: Spec
    in_place: bool
    holding: Holding
    gap_bytes: int
    id_dtype: torch.dtype
    num_layers: int = 2
    num_blocks: int = 5

    def __str__(self) -> str:
        ids = "i32" if self.id_dtype == torch.int32 else "i64"
        spec = self.source
        return (
            f"{spec.family}.{spec.variant}-{self.target.family}.{self.target.variant}"
            f"-H{spec.heads}N{spec.tokens}D{spec.head_dim}-{spec.dtype}"
            f"-{'in-place' if self.in_place else 'staged'}-{self.holding}+{self.gap_bytes}-{ids}"
        )


def pair(
    heads: int, tokens: int, head_dim: int, dtype: str, v: str, *, reverse: bool
) -> tuple[Spec, Spec]:
    """Standard and shuffled pages of one shape, in the asked direction."""
    standard = Spec("standard", "HNC", heads, tokens, head_dim, dtype)
    shuffled = Spec("aiter-shuffle", v, heads, tokens, head_dim, dtype)
    return (shuffled, standard) if reverse else (standard, shuffled)


def full_matrix() -> Iterator[Case]:
    """Every shape with every variant, direction and placement."""
    shapes = product(("bfloat16", "float8_e4m3fn"), (1, 3, 5, 8), (16, 32), (64, 128, 256))
    for dtype, heads, tokens, head_dim in shapes:
        for v, reverse, in_place in product(("tiled", "transposed"), (False, True), (True, False)):
            if v == "transposed" and tokens * (1 if "8" in dtype else 2) < 16:
                continue
            yield _case(len(v) + heads, heads, tokens, head_dim, dtype, v, reverse, in_place)


def default_matrix() -> Iterator[Case]:
    """Every shape once, variants, directions and placements in turn."""
    shapes = product((1, 3, 5, 8), (16, 32), (64, 128, 256), ("bfloat16", "float8_e4m3fn"))
    for number, (heads, tokens, head_dim, dtype) in enumerate(shapes):
        # 8 combinations against 48 shapes in steps that meet every combination at every extent.
        turn = (number + number // 8 + number // 24) % 8
        v = "tiled" if turn & 1 else "transposed"
        yield _case(number, heads, tokens, head_dim, dtype, v, bool(turn & 2), bool(turn & 4))


def _case(
    number: int,
    heads: int,
    tokens: int,
    head_dim: int,
    dtype: str,
    v: str,
    reverse: bool,
    in_place: bool,
) -> Case:
    source, target = pair(heads, tokens, head_dim, dtype, v, reverse=reverse)
    holdings: tuple[Holding, ...] = ("planes", "joint")
    if target.family == "standard":
        holdings = ("joint", "heads", "interleaved")
    holding = holdings[number % len(holdings)]
    gap_bytes = (0, 48)[number // 2 % 2]
    id_dtype = (torch.int32, torch.int64)[number // 3 % 2]
    return Case(source, target, in_place, holding, gap_bytes, id_dtype)


def check(case: Case, prepare: Prepare, *, device: str = "cpu", seed: int = 0) -> None:
    """Convert some pages of a poisoned cache; every byte of all memory must be as expected."""
    setup = set_up(case, device=device, seed=seed)
    conversion = prepare(setup.source, setup.target.pages)
    assert conversion.in_place == case.in_place
    before = setup.target.memory.clone()
    conversion(setup.source_ids, setup.target_ids)
    if device != "cpu":
        torch.cuda.synchronize()
    assert not torch.equal(before, setup.target.memory), "nothing was written"
    for name, cache in setup.caches.items():
        wrong = cache.differing()
        assert wrong.size == 0, f"{wrong.size} bytes of the {name} differ, first at {wrong[:8]}"


@dataclass
class SetUp:
    """Memory as it is before a conversion, images as they must be after it."""

    source: Pages
    target: Cache
    source_ids: torch.Tensor
    target_ids: torch.Tensor
    caches: dict[str, Cache]


def set_up(case: Case, *, device: str = "cpu", seed: int = 0) -> SetUp:
    """Pages in random distinct blocks, padding ids between them, poison everywhere else."""
    rng = np.random.default_rng(seed)
    source_format, target_format = page_format(case.source), page_format(case.target)
    shared: dict[str, Any] = {"num_layers": case.num_layers, "device": device}
    target = make_cache(
        rng,
        target_format,
        holding=case.holding,
        num_blocks=case.num_blocks,
        gap_bytes=case.gap_bytes,
        **shared,
    )
    caches = {"target": target}
    blocks_out = rng.permutation(case.num_blocks)[: max(1, case.num_blocks - 2)]
    if case.in_place:
        blocks_in, source = blocks_out, target.pages.seen_as(source_format)
    else:
        # A slab: dense, whole pages, another number of blocks.
        num_pages = case.num_blocks + 2
        slab = make_cache(rng, source_format, holding="joint", num_blocks=num_pages, **shared)
        caches["source"] = slab
        blocks_in, source = rng.permutation(num_pages)[: blocks_out.size], slab.pages
    tokens = [[random_tokens(rng, case.source) for _ in blocks_out] for _ in range(case.num_layers)]
    for layer, of_layer in enumerate(tokens):
        for block, (k, v) in zip(blocks_in, of_layer, strict=True):
            caches.get("source", target).write(layer, int(block), write_page(case.source, k, v))
    for cache in caches.values():
        cache.upload()
    for layer, of_layer in enumerate(tokens):
        for block, (k, v) in zip(blocks_out, of_layer, strict=True):
            target.write(layer, int(block), write_page(case.target, k, v))
    ids_out = np.insert(blocks_out, (0, blocks_out.size), -1)
    ids_in = np.insert(blocks_in, (0, blocks_in.size), -1)
    if not case.in_place:
        # Padding on one side only: the block that the other side names must not be touched.
        untouched = np.setdiff1d(np.arange(case.num_blocks), blocks_out)
        ids_out[0], ids_in[-1] = untouched[0], blocks_in[0]
    target_ids = torch.tensor(ids_out, dtype=case.id_dtype, device=device)
    source_ids = target_ids
    if not case.in_place:
        source_ids = torch.tensor(ids_in, dtype=case.id_dtype, device=device)
    return SetUp(source, target, source_ids, target_ids, caches)
