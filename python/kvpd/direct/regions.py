"""Regions of another process, and where their bytes are in this one."""

from __future__ import annotations

from collections.abc import Sequence

from kvpd._kvpd import Region
from kvpd.direct.driver import Extent
from kvpd.errors import DirectError


def device_of(regions: Sequence[Region]) -> int:
    """The one GPU that all regions are on.

    Raises:
        DirectError: there is none, or no region.
    """
    devices = {(region.memory, region.device) for region in regions}
    if len(devices) != 1 or next(iter(devices))[0] != "vram":
        found = ", ".join(sorted(f"{memory}:{device}" for memory, device in devices)) or "none"
        raise DirectError(
            f"direct placement needs all regions on one GPU, they are on {found}",
            code="not-one-gpu",
            field="regions",
            got=found,
            expected="vram of one device",
        )
    return next(iter(devices))[1]


def translated(region: Region, base: int, mapped: Extent, device: int) -> Region:
    """The same region where its memory is mapped here.

    Only the distance from the allocation's base is taken from the peer. Whatever it says, every
    byte that a kernel may touch lies inside the mapping, whose extent is our driver's own.

    Args:
        region: as the peer published it; its extent holds all of its blocks.
        base: where the peer says that the allocation begins, at or below the region.
        mapped: the allocation's mapping in this process.
        device: our GPU, for which it is mapped.

    Raises:
        DirectError: the region goes on behind the mapping.
    """
    offset = region.address - base
    if offset < 0 or offset + region.extent_bytes > mapped.num_bytes:
        raise DirectError(
            f"the region at {region.address:#x} is bytes [{offset}, "
            f"{offset + region.extent_bytes}) of an allocation of {mapped.num_bytes}",
            code="outside-mapping",
            field="regions",
            got=f"[{offset}, {offset + region.extent_bytes})",
            expected=f"inside [0, {mapped.num_bytes})",
        )
    return Region(
        mapped.address + offset,
        region.num_blocks,
        region.block_bytes,
        region.block_stride_bytes,
        format=region.format,
        planes=None if region.format is None else region.planes,
        layers=region.layers,
        memory=region.memory,
        device=device,
        extent_bytes=region.extent_bytes,
    )
