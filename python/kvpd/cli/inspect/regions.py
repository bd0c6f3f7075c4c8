"""The regions of one rank, those of alike layers folded into one row."""

from __future__ import annotations

import msgspec

from kvpd._kvpd import Region
from kvpd.vllm.published import StockMetadata
from kvpd.wire import Handshake


class RegionGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Regions of several layers that differ only in layer and address.

    Attributes:
        layers: names, in the engine's order.
        position: which of its layer's regions this is, from 0.
        planes: which bytes of a page a block holds, "" of an untagged engine.
        page_format: "" of an untagged engine.
        block_bytes, block_stride_bytes, num_blocks: geometry.
        is_dense: the stride is the length, so that neighbours can merge into one descriptor.
        memory: "dram", "vram", or what the engine calls it.
    """

    layers: tuple[str, ...]
    position: int
    planes: str
    page_format: str
    block_bytes: int
    block_stride_bytes: int
    num_blocks: int
    is_dense: bool
    memory: str


def groups_of(metadata: StockMetadata, handshake: Handshake | None) -> list[RegionGroup]:
    """Fold regions; of a tagged engine also what their blocks hold.

    A tag that names other regions than the metadata is no help in describing those.
    """
    tagged = () if handshake is None else handshake.description.regions
    if len(tagged) != len(metadata.block_lens):
        tagged = ()
    names = metadata.region_names or [f"region {at}" for at in range(len(metadata.block_lens))]
    counts = metadata.region_num_blocks or [metadata.num_blocks] * len(metadata.block_lens)
    seen: dict[str, int] = {}
    groups: dict[RegionGroup, list[str]] = {}
    for at, block_bytes in enumerate(metadata.block_lens):
        position = seen[names[at]] = seen.get(names[at], -1) + 1
        layers = [names[at]]
        memory = metadata.region_mem_types[at].lower() if metadata.region_mem_types else "unknown"
        region = tagged[at] if tagged else None
        if region is not None:
            layers, memory = list(region.layers) or layers, region.memory
        group = RegionGroup(
            layers=(),
            position=position,
            planes="" if region is None else _planes(region),
            page_format="" if region is None or region.format is None else region.format.name,
            block_bytes=block_bytes,
            block_stride_bytes=metadata.block_strides[at],
            num_blocks=counts[at],
            is_dense=block_bytes == metadata.block_strides[at],
            memory=memory,
        )
        groups.setdefault(group, []).extend(layers)
    return [
        msgspec.structs.replace(group, layers=tuple(layers)) for group, layers in groups.items()
    ]


def _planes(region: Region) -> str:
    if region.format is None:
        return ""
    whole = region.format.plane_bytes
    return ", ".join(
        f"plane {span.plane}"
        if span.num_bytes == whole[span.plane]
        else f"plane {span.plane} bytes {span.start_bytes} to "
        f"{span.start_bytes + span.num_bytes - 1}"
        for span in region.planes
    )


def total_bytes(metadata: StockMetadata) -> int:
    """Bytes of all blocks of all regions, gaps not counted."""
    counts = metadata.region_num_blocks or [metadata.num_blocks] * len(metadata.block_lens)
    return sum(length * count for length, count in zip(metadata.block_lens, counts, strict=True))
