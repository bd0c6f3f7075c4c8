"""The prefill's side: offer the allocations that hold a cache to processes of this host."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from kvpd.direct.channel import MAX_ALLOCATIONS, Allocation, Granted, encode
from kvpd.direct.driver import Driver, load_driver
from kvpd.direct.part import RUNTIME, DirectPart, HostIdentity
from kvpd.direct.regions import device_of
from kvpd.direct.server import OfferServer
from kvpd.errors import DirectError

if TYPE_CHECKING:
    from kvpd._kvpd import Region
    from kvpd.direct.driver import Extent


class Exporter:
    """Offers a cache for direct placement from construction until `close`.

    A handle opens the whole allocation that a region lies in, not the region alone. The regions'
    memory must outlive the offer.

    Args:
        regions: of one GPU of this process, as the handshake publishes them.
        driver: the GPU's; None for this machine's.

    Attributes:
        part: what the handshake carries of the offer.

    Raises:
        DirectError: the regions are not GPU memory that other processes can map, this host cannot
            be identified, or direct placement is not available here at all.
    """

    def __init__(self, regions: Sequence[Region], *, driver: Driver | None = None) -> None:
        device = device_of(regions)
        driver = load_driver() if driver is None else driver
        device_uuid = driver.device_uuid(device)
        allocations = _allocations(regions, device, driver)
        granted = Granted(
            tuple(
                Allocation(allocation.address, driver.export(allocation, device).reveal())
                for allocation in allocations
            )
        )
        host = HostIdentity.of_this_process()
        self._server = OfferServer(encode(granted))
        self.part = DirectPart(
            runtime=RUNTIME, host=host, device_uuid=device_uuid, endpoint=self._server.endpoint
        )

    @property
    def num_mapped(self) -> int:
        """Requesters that have the memory mapped, or are about to."""
        return self._server.num_mapped

    def close(self, *, timeout_seconds: float = 5.0) -> int:
        """Withdraw the offer, tell requesters, and wait for them to unmap; idempotent.

        Memory that is freed while it is mapped elsewhere leaves the driver undefined: free it only
        when this returned 0, or when the process ends.

        Returns:
            Requesters that still have it mapped.
        """
        return self._server.close(timeout_seconds)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _allocations(regions: Sequence[Region], device: int, driver: Driver) -> list[Extent]:
    """The allocations that hold the regions, each once, in order of their addresses."""
    found: list[Extent] = []
    for region in sorted(regions, key=lambda region: region.address):
        if not found or region.address >= found[-1].end:
            found.append(driver.allocation_of(region.address, device))
        end = region.address + region.extent_bytes
        if end > found[-1].end:
            raise DirectError(
                f"the region at {region.address:#x} goes on to {end:#x}, its allocation only to "
                f"{found[-1].end:#x}",
                code="outside-allocation",
                field="regions",
                got=hex(end),
                expected=f"at most {found[-1].end:#x}",
            )
    if len(found) > MAX_ALLOCATIONS:
        raise DirectError(
            f"the cache lies in {len(found)} allocations",
            code="too-many-allocations",
            field="regions",
            got=len(found),
            expected=f"at most {MAX_ALLOCATIONS}",
        )
    return found
