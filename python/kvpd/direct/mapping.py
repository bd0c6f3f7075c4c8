"""The decoder's side: a peer's pages, mapped for our own kernels."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Self

from kvpd.direct.client import Connection, fetch
from kvpd.direct.driver import Driver, Extent, MemoryHandle, load_driver
from kvpd.direct.part import RUNTIME, DirectPart, HostIdentity, check_same_host
from kvpd.direct.regions import device_of, translated
from kvpd.errors import DirectError

if TYPE_CHECKING:
    import torch

    from kvpd._kvpd import Region
    from kvpd.direct.channel import Allocation


# Every mapping that is not closed. If one could be collected, its connection would end and tell the
# exporter that nothing is mapped, while views of the memory may be in use.
_open: set[Mapping] = set()


class Mapping:
    """A peer's regions in our address space; `map_peer` makes one.

    ``Pages.of(format, mapping.regions, mapping.storages)`` are the peer's pages. Everything made
    from it is dangling after `close`. The memory stays readable when the peer dies.

    Attributes:
        regions: the peer's regions, in their order, at our addresses and on our GPU.
        storages: uint8 [bytes of a mapping] tensors of our GPU over each mapped allocation.
    """

    def __init__(
        self,
        regions: tuple[Region, ...],
        storages: tuple[torch.Tensor, ...],
        connection: Connection,
        undo: ExitStack,
    ) -> None:
        self.regions = regions
        self.storages = storages
        self._connection = connection
        self._undo = undo
        _open.add(self)

    def is_offered(self) -> bool:
        """Whether the exporter is alive and has not withdrawn its offer. Never blocks.

        Once False, start nothing new, wait for what runs, and close.
        """
        return self._connection.is_open()

    def close(self) -> None:
        """Unmap everything, then tell the exporter; idempotent.

        Only after the last kernel that reads the memory has ended, and before the exporter frees
        it: a kernel that still reads would fault, and with it everything on the GPU of ours.

        Raises:
            DirectError: the driver refused to unmap something; the rest was unmapped.
        """
        self.storages = ()
        _open.discard(self)
        self._undo.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def map_peer(
    part: DirectPart,
    regions: Sequence[Region],
    device: int,
    *,
    driver: Driver | None = None,
    timeout_seconds: float = 5.0,
) -> Mapping:
    """Map the memory of a peer's regions for kernels of one of our GPUs.

    Blocks for a few milliseconds, at worst a few times `timeout_seconds`. May run on any thread.

    Args:
        part: the offer in the peer's handshake.
        regions: the peer's, as its handshake publishes them.
        device: ordinal of our GPU.
        driver: the GPU's; None for this machine's.
        timeout_seconds: for each step of the conversation with the exporter.

    Raises:
        DirectError: why this pair cannot be served directly; nothing stays mapped.
    """
    if part.runtime != RUNTIME:
        raise DirectError(
            f"the peer offers memory of {part.runtime}, where direct placement is not verified",
            code="other-runtime",
            field="runtime",
            got=part.runtime,
            expected=RUNTIME,
        )
    check_same_host(part.host, HostIdentity.of_this_process())
    device_of(regions)
    driver = load_driver() if driver is None else driver
    device_uuid = driver.device_uuid(device)
    _check_reachable(driver, device, part.device_uuid)
    connection, allocations = fetch(part, device_uuid, timeout_seconds=timeout_seconds)
    with ExitStack() as undo:
        # Closed in reverse: the exporter is told only when nothing is mapped any more.
        undo.callback(connection.close)
        holders = _holders(regions, allocations)
        mapped: dict[int, Extent] = {}
        for allocation in dict.fromkeys(holders):
            extent = driver.open(MemoryHandle(allocation.handle), device)
            undo.callback(partial(driver.close, extent, device))
            mapped[allocation.base] = extent
        ours = tuple(
            translated(region, holder.base, mapped[holder.base], device)
            for region, holder in zip(regions, holders, strict=True)
        )
        torch_device = driver.torch_device(device)
        storages = tuple(_bytes_of(extent, torch_device) for extent in mapped.values())
        kept = undo.pop_all()
    return Mapping(ours, storages, connection, kept)


def _check_reachable(driver: Driver, device: int, exporter_uuid: str) -> None:
    """Refuse a GPU that ours cannot read. One that this process does not see is left to the driver,
    which then fails to map."""
    peer = driver.find_device(exporter_uuid)
    if peer is not None and not driver.can_access_peer(device, peer):
        raise DirectError(
            f"GPU {device} cannot read the memory of GPU {peer} ({exporter_uuid})",
            code="unreachable-gpu",
            field="device_uuid",
            got=exporter_uuid,
            expected="a GPU with peer access",
        )


def _holders(regions: Sequence[Region], allocations: Sequence[Allocation]) -> list[Allocation]:
    """For each region the allocation with the highest base at or below it."""
    by_base = sorted(allocations, key=lambda allocation: allocation.base)
    bases = [allocation.base for allocation in by_base]
    if len(set(bases)) != len(bases):
        raise DirectError(
            "the exporter names an allocation twice", code="malformed", field="allocations"
        )
    holders = []
    for region in regions:
        at = bisect_right(bases, region.address)
        if not at:
            raise DirectError(
                f"the region at {region.address:#x} lies below every allocation offered",
                code="outside-mapping",
                field="regions",
                got=hex(region.address),
                expected=f"at least {bases[0]:#x}",
            )
        holders.append(by_base[at - 1])
    return holders


def _bytes_of(extent: Extent, device: torch.device) -> torch.Tensor:
    """uint8 [num_bytes] over memory that torch did not allocate and will not free.

    The device is given, not asked of the driver as by the CUDA array interface: the driver may name
    the exporter's GPU, and our kernels would be launched there.
    """
    import torch

    construct = getattr(torch._C, "_construct_storage_from_data_pointer", None)
    if construct is None:
        raise DirectError(
            f"torch {torch.__version__} cannot view memory that it did not allocate",
            code="no-view",
            field="torch",
            got=torch.__version__,
            expected="2.8 to 2.13",
        )
    storage = construct(extent.address, device, extent.num_bytes)
    view = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
    found = (view.data_ptr(), view.numel(), view.device)
    if found != (extent.address, extent.num_bytes, device):
        raise DirectError(
            f"a view of {extent.num_bytes} bytes at {extent.address:#x} on {device} came out as "
            f"{found[1]} at {found[0]:#x} on {found[2]}",
            code="no-view",
            field="torch",
            got=found,
            expected=(extent.address, extent.num_bytes, device),
        )
    return view
