"""The compiled core: page formats, regions, the verdict, runs, descriptor rows and ids.

Every number is checked at construction; what exists is valid. All classes are immutable.
Bytes are bytes, never elements; block ids count pages inside a region.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Literal, final

import numpy as np
from numpy.typing import NDArray

from kvpd.words import Interior as _Interior
from kvpd.words import Memory as _Memory

__all__ = [
    "Component",
    "EngineDescription",
    "EngineFacts",
    "PageFormat",
    "PlaneSpan",
    "Reason",
    "Region",
    "Run",
    "Runs",
    "TransferPlan",
    "Verdict",
    "__version__",
    "cache_regions",
    "negotiate",
    "runs",
    "slab_bytes",
    "slab_regions",
    "staged_ids",
]

__version__: str

@final
class Component:
    """One named tensor inside a page, with the affine map that places it in one plane.

    The byte of element (head h, token n, channel d) inside `plane` is
    ``base_bytes + h*head_stride_bytes
    + (n // token_tile)*token_tile_stride_bytes + (n % token_tile)*token_stride_bytes
    + (d // channel_tile)*channel_tile_stride_bytes + (d % channel_tile)*channel_stride_bytes``.
    """

    def __new__(
        cls,
        name: str,
        *,
        dtype: Any,
        heads: int,
        tokens: int,
        channels: int,
        plane: int,
        base_bytes: int,
        head_stride_bytes: int,
        token_tile: int,
        token_tile_stride_bytes: int,
        token_stride_bytes: int,
        channel_tile: int,
        channel_tile_stride_bytes: int,
        channel_stride_bytes: int,
    ) -> Component: ...
    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def element_bytes(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def channels(self) -> int: ...
    @property
    def plane(self) -> int: ...
    @property
    def base_bytes(self) -> int: ...
    @property
    def head_stride_bytes(self) -> int: ...
    @property
    def token_tile(self) -> int: ...
    @property
    def token_tile_stride_bytes(self) -> int: ...
    @property
    def token_stride_bytes(self) -> int: ...
    @property
    def channel_tile(self) -> int: ...
    @property
    def channel_tile_stride_bytes(self) -> int: ...
    @property
    def channel_stride_bytes(self) -> int: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@final
class PlaneSpan:
    """A contiguous byte range of one plane of a page: [start_bytes, start_bytes + num_bytes)."""

    def __new__(cls, plane: int, start_bytes: int, num_bytes: int) -> PlaneSpan: ...
    @property
    def plane(self) -> int: ...
    @property
    def start_bytes(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@final
class PageFormat:
    """The interior of a page: where each element of each component lies.

    Equality, hash and digest are of the map, not of the name: formats that place every element
    alike are equal. Construction proves that every byte of every plane is covered exactly once
    or is declared padding; it raises `FormatError` otherwise.
    """

    @staticmethod
    def standard(
        *, heads: int, tokens: int, head_dim: int, dtype: Any, interior: _Interior = "HNC"
    ) -> PageFormat:
        """vLLM's packed page: one plane, [H, N, 2*D] ("HNC") or [N, H, 2*D] ("NHC").

        K and V lie side by side per token: the first D channels are K's.
        """
    @staticmethod
    def split_kv(
        *, heads: int, tokens: int, head_dim: int, dtype: Any, interior: _Interior = "HNC"
    ) -> PageFormat:
        """Legacy page: a K plane and a V plane, each [H, N, D] ("HNC") or [N, H, D] ("NHC")."""
    @staticmethod
    def aiter_shuffle(
        *,
        heads: int,
        tokens: int,
        head_dim: int,
        dtype: Any,
        v: Literal["tiled", "transposed"] = "tiled",
    ) -> PageFormat:
        """AITER's page: K plane [H, D/x, N, x]; V plane [H, N/x, D, x] ("tiled") or [H, D, N]
        ("transposed"); x = 16 / element bytes."""
    @staticmethod
    def from_components(
        family: str,
        components: Sequence[Component],
        plane_bytes: Sequence[int],
        padding: Sequence[PlaneSpan] = (),
    ) -> PageFormat:
        """Any other row of strides; the same proof. `family` is a name for people."""
    @property
    def family(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def digest(self) -> str: ...
    @property
    def components(self) -> tuple[Component, ...]: ...
    @property
    def padding(self) -> tuple[PlaneSpan, ...]: ...
    @property
    def plane_bytes(self) -> tuple[int, ...]: ...
    @property
    def page_bytes(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    def offset(self, component: str, head: int, token: int, channel: int) -> tuple[int, int]: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@final
class Region:
    """Registered strided memory, `block_bytes` long from ``address + block*block_stride_bytes``.

    `planes` says which bytes of the page a block holds, in order: plane numbers (whole planes) or
    `PlaneSpan`s. An untagged region has ``format=None`` and no planes. `extent_bytes`, if given, is
    the registered length from `address`; blocks must stay inside it.

    Numbers below 0 or past 64 bits raise `OverflowError`, all others that cannot be `RegionError`.
    """

    def __new__(
        cls,
        address: int,
        num_blocks: int,
        block_bytes: int,
        block_stride_bytes: int,
        *,
        format: PageFormat | None = None,
        planes: Sequence[int | PlaneSpan] | None = None,
        layers: Sequence[str] = (),
        memory: _Memory = "dram",
        device: int = 0,
        extent_bytes: int | None = None,
    ) -> Region: ...
    @property
    def address(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def block_bytes(self) -> int: ...
    @property
    def block_stride_bytes(self) -> int: ...
    @property
    def format(self) -> PageFormat | None: ...
    @property
    def planes(self) -> tuple[PlaneSpan, ...]: ...
    @property
    def layers(self) -> tuple[str, ...]: ...
    @property
    def memory(self) -> _Memory: ...
    @property
    def device(self) -> int: ...
    @property
    def extent_bytes(self) -> int: ...
    @property
    def is_dense(self) -> bool: ...
    def block_address(self, block_id: int) -> int: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

def cache_regions(
    format: PageFormat,
    layout: str,
    *,
    address: int,
    num_blocks: int,
    layers: Sequence[str],
    memory: _Memory = "dram",
    device: int = 0,
) -> tuple[Region, ...]:
    """The regions of a whole cache laid out from `address` in one of vLLM's layouts
    (LBHNC, LBNHC, LHBNC, BLHNC, BLNHC, BHLNC, or the aliases HND, NHD), with real byte strides.

    Head slots of a page: one per head for a one-plane page, one per plane otherwise.
    """

@final
class EngineFacts:
    """What a refusal is explained with; every field is compared or named, none is guessed."""

    def __new__(
        cls,
        *,
        model: str,
        model_dtype: str,
        cache_dtype: str,
        total_kv_heads: int,
        head_dim: int,
        block_size: int,
        layout: str,
        backend: str,
        release: str,
        connector: str,
        tp_size: int = 1,
        tp_rank: int = 0,
        num_kv_groups: int = 1,
        uses_mla: bool = False,
    ) -> EngineFacts: ...
    @property
    def model(self) -> str: ...
    @property
    def model_dtype(self) -> str: ...
    @property
    def cache_dtype(self) -> str: ...
    @property
    def total_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def layout(self) -> str: ...
    @property
    def backend(self) -> str: ...
    @property
    def release(self) -> str: ...
    @property
    def connector(self) -> str: ...
    @property
    def tp_size(self) -> int: ...
    @property
    def tp_rank(self) -> int: ...
    @property
    def num_kv_groups(self) -> int: ...
    @property
    def uses_mla(self) -> bool: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@final
class EngineDescription:
    """What one rank of an engine publishes: facts and regions.

    Construction proves that no two regions overlap and that the regions of every tagged layer hold
    each byte of its page exactly once; it raises `DescriptionError` otherwise.
    """

    def __new__(cls, facts: EngineFacts, regions: Sequence[Region]) -> EngineDescription: ...
    @property
    def facts(self) -> EngineFacts: ...
    @property
    def regions(self) -> tuple[Region, ...]: ...
    @property
    def layers(self) -> tuple[str, ...]: ...
    @property
    def format(self) -> PageFormat | None:
        """The one format all layers share; None when a region is untagged or formats differ."""
    @property
    def num_blocks(self) -> int:
        """Blocks that every region has."""
    def __eq__(self, other: object, /) -> bool: ...

@final
class Reason:
    @property
    def code(self) -> str: ...
    @property
    def field(self) -> str: ...
    @property
    def local(self) -> str: ...
    @property
    def remote(self) -> str: ...
    @property
    def remedy(self) -> str: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@final
class Verdict:
    """The outcome of `negotiate`; ``str(verdict)`` is the whole explanation."""

    @property
    def kind(self) -> Literal["identical", "convert", "refuse"]: ...
    @property
    def reasons(self) -> tuple[Reason, ...]:
        """Why a pair is refused; empty unless kind is "refuse"."""
    @property
    def warnings(self) -> tuple[Reason, ...]:
        """What an accepted pair rests on unproved (an untagged peer)."""
    @property
    def source(self) -> PageFormat | None:
        """What is read from the peer; set when kind is "convert"."""
    @property
    def target(self) -> PageFormat | None:
        """What the local engine keeps; set when kind is "convert"."""
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

def negotiate(
    local: PageFormat | EngineDescription,
    remote: PageFormat | EngineDescription | None,
    *,
    convert: bool = False,
    require_tagged: bool = False,
) -> Verdict:
    """Judge a pair from the reader's side: may `local` read `remote`'s pages?

    `remote` is None for a peer that published nothing of kvpd's (untagged). A pair that does not
    fit raises nothing: that is a refusal with every reason.
    """

@final
class Run:
    """Pages [local, local + num_pages) <- [remote, remote + num_pages)."""

    @property
    def local(self) -> int: ...
    @property
    def remote(self) -> int: ...
    @property
    def num_pages(self) -> int: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@final
class Runs:
    """Maximal runs of pages consecutive on both sides, ordered by remote id."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Run]: ...
    def __getitem__(self, index: int, /) -> Run: ...
    @property
    def num_pages(self) -> int: ...
    @property
    def local_ids(self) -> NDArray[np.int32]:
        """Local ids of all pages in run order."""
    @property
    def remote_ids(self) -> NDArray[np.int32]:
        """Remote ids of all pages in run order, ascending."""

def runs(
    local_ids: Sequence[int] | NDArray[np.integer[Any]],
    remote_ids: Sequence[int] | NDArray[np.integer[Any]],
) -> Runs:
    """Pair ids by position, sort by remote id, and merge.

    Raises `PlanError` when lengths differ, an id is negative or above 2**31-1, or an id occurs
    twice on one side; `TypeError` for anything but integers.
    """

def staged_ids(remote_ids: Sequence[int] | NDArray[np.integer[Any]]) -> Runs:
    """Runs into slab pages 0, 1, 2, ... in ascending order of the remote ids: the fewest runs.

    Raises like `runs`.
    """

@final
class TransferPlan:
    """Descriptor rows for reading pages raw from `source` into `target`.

    Byte i of a page of `source` lands at byte i of a page of `target`, planes counted one after
    another. `target` is the local cache itself (placement in place, per page) or a slab that holds
    pages of the source's format (placement staged, see `slab_regions`).

    A row is what one region on each side has in common of one layer's page; row r is read from
    row r.
    Rows are (address, bytes, device, stride, count) with the region's own stride, as NIXL's strided
    lists take them; the ids of row r are ``base + block``, bases being cumulative counts.
    """

    def __new__(cls, target: Sequence[Region], source: Sequence[Region]) -> TransferPlan: ...
    @property
    def num_rows(self) -> int: ...
    @property
    def page_bytes_all_layers(self) -> int:
        """Bytes moved per block: the sum over layers of the page's bytes."""
    @property
    def local_rows(self) -> NDArray[np.uint64]: ...
    @property
    def remote_rows(self) -> NDArray[np.uint64]: ...
    @property
    def local_memory(self) -> _Memory: ...
    @property
    def remote_memory(self) -> _Memory: ...
    def descriptor_ids(self, runs: Runs) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """(local ids, remote ids), row by row, pages in run order.

        Raises `PlanError` for a block outside the rows.
        """
    def num_descriptors(self, runs: Runs) -> int:
        """Descriptors before merging: rows x pages."""
    def num_merged_descriptors(self, runs: Runs) -> int:
        """Descriptors after NIXL (>= 1.5) merged neighbours.

        A run is one descriptor where both rows have stride == bytes, else one per page.
        """

def slab_regions(
    source: Sequence[Region],
    *,
    address: int,
    num_pages: int,
    memory: _Memory = "dram",
    device: int = 0,
) -> tuple[Region, ...]:
    """A dense slab for `num_pages` raw pages of every layer of `source`.

    One region per layer, layer after layer, from `address`; `slab_bytes` long in all.
    """

def slab_bytes(source: Sequence[Region], *, num_pages: int) -> int:
    """Bytes a slab of `num_pages` pages needs."""
