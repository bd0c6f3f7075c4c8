"""What an accepted pair costs: bytes, descriptors, and the times that the planner predicts."""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np

from kvpd._kvpd import EngineDescription, LinkModel, Planner, Region, runs, slab_bytes

_TOKENS = 1000

PlacementName = Literal["as_stock", "in_place", "staged", "direct"]


class PlacementCost(msgspec.Struct, frozen=True, kw_only=True):
    """Where raw pages land, and what that takes.

    Attributes:
        placement: "as_stock" (equal pages), "in_place", "staged" in a slab that holds the whole
            request, or "direct" from the prefill's memory, where both sides offer theirs.
        num_descriptors: before NIXL merges neighbours.
        merged_consecutive: left of them where block ids are consecutive on both sides.
        merged_scattered: left where no two are.
        ms_consecutive, ms_scattered: predicted, conversion included.
        explanation: how the planner came to the scattered ones, for people.
    """

    placement: PlacementName
    num_descriptors: int
    merged_consecutive: int
    merged_scattered: int
    ms_consecutive: float
    ms_scattered: float
    explanation: str


class LinkRates(msgspec.Struct, frozen=True, kw_only=True):
    """What the prediction rests on."""

    bytes_per_second: float
    seconds_per_descriptor: float
    seconds_per_chunk: float
    convert_bytes_per_second: float
    direct_bytes_per_second: float


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """Of one request on one rank.

    Attributes:
        bytes_per_1k_tokens: of all layers.
        num_tokens, num_pages, num_bytes: of the request that the rest is about: 1,000 tokens in
            whole blocks, or as many as fit both caches scattered.
        convert_ms: of the conversion alone, part of the predicted times; null if there is none.
        link: the rates.
        placements: each by itself.
    """

    bytes_per_1k_tokens: int
    num_tokens: int
    num_pages: int
    num_bytes: int
    convert_ms: float | None
    link: LinkRates
    placements: list[PlacementCost]


def cost_of(
    prefill: EngineDescription,
    decode: EngineDescription,
    link: LinkModel,
    *,
    converts: bool,
    direct: bool = False,
) -> Cost:
    """What about 1,000 tokens cost between two engines that were accepted.

    Args:
        converts: pages are converted.
        direct: the decoder can read the prefill's memory.

    Raises:
        PlanError: the regions do not fit each other.
    """
    block_size = decode.facts.block_size
    num_blocks = min(prefill.num_blocks, decode.num_blocks)
    num_pages = max(1, min(-(-_TOKENS // block_size), num_blocks // 2))
    page_bytes = slab_bytes(prefill.regions, num_pages=1)
    num_bytes = num_pages * page_bytes
    placements = [
        _placement("in_place" if converts else "as_stock", prefill, decode, link, num_pages, None)
    ]
    if converts:
        slab = _slab(decode, num_bytes)
        placements.append(_placement("staged", prefill, decode, link, num_pages, slab))
    if direct:
        placements.append(_placement("direct", prefill, decode, link, num_pages, None))
    return Cost(
        bytes_per_1k_tokens=_TOKENS * page_bytes // block_size,
        num_tokens=num_pages * block_size,
        num_pages=num_pages,
        num_bytes=num_bytes,
        convert_ms=_ms(num_bytes / link.convert_bytes_per_second) if converts else None,
        link=LinkRates(
            bytes_per_second=link.bytes_per_second,
            seconds_per_descriptor=link.seconds_per_descriptor,
            seconds_per_chunk=link.seconds_per_chunk,
            convert_bytes_per_second=link.convert_bytes_per_second,
            direct_bytes_per_second=link.direct_bytes_per_second,
        ),
        placements=placements,
    )


def _placement(
    name: PlacementName,
    prefill: EngineDescription,
    decode: EngineDescription,
    link: LinkModel,
    num_pages: int,
    slab: Region | None,
) -> PlacementCost:
    planner = Planner(
        decode.regions,
        prefill.regions,
        link=link,
        max_pages=num_pages,
        slab=slab,
        in_place=name in ("in_place", "as_stock"),
        direct=name == "direct",
    )
    ids = np.arange(num_pages)
    consecutive, scattered = (planner.plan(runs(step * ids, step * ids)) for step in (1, 2))
    return PlacementCost(
        placement=name,
        num_descriptors=consecutive.num_descriptors,
        merged_consecutive=consecutive.num_merged_descriptors,
        merged_scattered=scattered.num_merged_descriptors,
        ms_consecutive=_ms(consecutive.predicted_seconds),
        ms_scattered=_ms(scattered.predicted_seconds),
        explanation=f"{planner.explain()}\n{scattered.explain()}",
    )


def _slab(decode: EngineDescription, num_bytes: int) -> Region:
    """Memory for raw pages beside the decoder's cache; nothing is written there."""
    first = decode.regions[0]
    end = max(region.address + region.extent_bytes for region in decode.regions)
    return Region(end, 1, num_bytes, num_bytes, memory=first.memory, device=first.device)


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 4)
