"""The compiled core: page formats, regions, the verdict, runs, descriptor rows and ids.

Every number is checked at construction; what exists is valid. All classes are immutable.
Bytes are bytes, never elements; block ids count pages inside a region.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, final

import numpy as np
from numpy.typing import NDArray

from kvpd.words import Interior as _Interior
from kvpd.words import Memory as _Memory
from kvpd.words import Order as _Order
from kvpd.words import Placement as _Placement

__all__ = [
    "Chunk",
    "Claims",
    "Component",
    "Cut",
    "DescriptorRows",
    "EngineDescription",
    "EngineFacts",
    "LinkModel",
    "PageFormat",
    "Permutation",
    "PlaneSpan",
    "Planner",
    "Reason",
    "Region",
    "RequestPlan",
    "Run",
    "Runs",
    "TransferPlan",
    "Verdict",
    "__version__",
    "cache_regions",
    "negotiate",
    "runs",
    "slab_bytes",
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
    """What has to agree with a peer, or a refusal is explained with; none is guessed.

    None is unknown, and equals nothing. `model_config` maps the names of fields that decide what K
    and V are to their canonical texts; `scales` has, of a quantised cache, each layer's name and
    its scales of K and of V (one, or one a head). `cache_dtype` is the resolved element type;
    `cache_dtype_setting`, by default the same, what the operator set.
    """

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
        model_config: Mapping[str, str] | None = None,
        model_weights: str | None = None,
        quantization: str = "none",
        cache_dtype_setting: str | None = None,
        quantised_cache: bool = False,
        scales: Sequence[tuple[str, Sequence[float], Sequence[float]]] | None = None,
        speculative: str = "none",
        hybrid_manager: bool = False,
        tp_size: int = 1,
        tp_rank: int = 0,
        pp_size: int = 1,
        num_kv_groups: int = 1,
        uses_mla: bool = False,
    ) -> EngineFacts: ...
    @property
    def model(self) -> str: ...
    @property
    def model_config(self) -> dict[str, str] | None: ...
    @property
    def model_weights(self) -> str | None: ...
    @property
    def quantization(self) -> str: ...
    @property
    def model_dtype(self) -> str: ...
    @property
    def cache_dtype(self) -> str: ...
    @property
    def cache_dtype_setting(self) -> str: ...
    @property
    def quantised_cache(self) -> bool: ...
    @property
    def scales(self) -> tuple[tuple[str, tuple[float, ...], tuple[float, ...]], ...] | None: ...
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
    def speculative(self) -> str: ...
    @property
    def hybrid_manager(self) -> bool: ...
    @property
    def tp_size(self) -> int: ...
    @property
    def tp_rank(self) -> int: ...
    @property
    def pp_size(self) -> int: ...
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
    def is_shared(self) -> bool:
        """Both sides have one value, and that is what is wrong: `local` and `remote` are it."""
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
        """What an accepted pair rests on unproved: an untagged peer, unknown or other weights."""
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
    allow_other_weights: bool = False,
    converters: Sequence[tuple[PageFormat, PageFormat]] = (),
) -> Verdict:
    """Judge a pair from the reader's side: may `local` read `remote`'s pages?

    `remote` is None for a peer that published nothing of kvpd's (untagged). With
    `allow_other_weights` weights and their quantisation may differ, and nothing else. `converters`
    are pairs (remote, local) that a backend converts itself: with `convert` they are in scope
    whatever their components are. A pair that does not fit raises nothing: that is a refusal with
    every reason.
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

@final
class Claims:
    """Which of a cache's `num_blocks` blocks belong to requests in flight; none at first."""

    def __new__(cls, num_blocks: int) -> Claims: ...
    def claim(self, runs: Runs) -> None:
        """Claim the local blocks of a request, all or none.

        Raises `PlanError` for blocks that are claimed or that the cache does not have.
        """

    def release(self, runs: Runs) -> None:
        """Give the local blocks of a request back."""

    @property
    def num_claimed(self) -> int:
        """Claimed blocks."""

def runs(
    local_ids: Sequence[int] | NDArray[np.integer[Any]],
    remote_ids: Sequence[int] | NDArray[np.integer[Any]],
) -> Runs:
    """Pair ids by position, sort by remote id, and merge.

    Raises `PlanError` when lengths differ, an id is negative or above 2**31-1, or an id occurs
    twice on one side; `TypeError` for anything but integers.
    """

@final
class Permutation:
    """Pages of `source` become pages of `target`, on the host.

    Raises `ConversionError` unless both formats hold the same tensors.
    """

    def __new__(cls, source: PageFormat, target: PageFormat) -> Permutation: ...
    def convert(
        self,
        source: list[NDArray[np.uint8]] | None,
        target: list[NDArray[np.uint8]],
        source_ids: NDArray[np.int64],
        target_ids: NDArray[np.int64],
    ) -> None:
        """Convert page ``source_ids[i]`` of one layer into page ``target_ids[i]``, for every i.

        Args:
            source: pieces [num_blocks, piece_bytes] of which pages are made, in page order; None
                where the pages lie in `target`.
            target: pieces likewise. Padding is left alone.
            source_ids: [pages].
            target_ids: [pages].

        Raises `ConversionError` at the first page that an array does not have or whose bytes do not
        lie side by side; those before it are converted.
        """

@final
class DescriptorRows:
    """Descriptor rows of both sides, to prepare once. A row is (address, bytes, device, stride,
    count) with the region's own stride, as NIXL's strided lists take it, [rows, 5]; the ids of row
    r are ``base + block``, bases being cumulative counts.

    In place, row r is what one region on each side has in common of one layer's page. Staged, all
    layers share the slab's row (one for each part of a page, where the peer holds it in several
    regions). Which ids belong together is `RequestPlan.descriptor_ids`.
    """

    @property
    def local_rows(self) -> NDArray[np.uint64]: ...
    @property
    def remote_rows(self) -> NDArray[np.uint64]: ...
    @property
    def local_memory(self) -> _Memory: ...
    @property
    def remote_memory(self) -> _Memory: ...

@final
class TransferPlan:
    """Descriptor rows for reading pages raw from `source` into `target`.

    Byte i of a page of `source` lands at byte i of a page of `target`, planes counted one after
    another: placement in place, per page.

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

def slab_bytes(source: Sequence[Region], *, num_pages: int) -> int:
    """Bytes a slab of `num_pages` pages needs."""

@final
class LinkModel:
    """What a transfer costs. A READ takes `seconds_per_chunk`, `seconds_per_descriptor` for each
    descriptor left after NIXL merged neighbours, and its bytes at `bytes_per_second`, or at
    `merged_bytes_per_second` where some were merged (in host memory that can be slower).

    Numbers not given are those of `memory`: "vram" between two H200s over NVLink, "dram" between
    two processes of one host; `merged_bytes_per_second` and `direct_bytes_per_second` are
    `bytes_per_second` where only that is given. Raises `PlanError` for a number that is not finite
    or not above 0.
    """

    def __new__(
        cls,
        memory: _Memory = "vram",
        *,
        bytes_per_second: float | None = None,
        merged_bytes_per_second: float | None = None,
        seconds_per_descriptor: float | None = None,
        seconds_per_chunk: float | None = None,
        convert_bytes_per_second: float | None = None,
        direct_bytes_per_second: float | None = None,
    ) -> LinkModel: ...
    @property
    def bytes_per_second(self) -> float: ...
    @property
    def merged_bytes_per_second(self) -> float: ...
    @property
    def seconds_per_descriptor(self) -> float: ...
    @property
    def seconds_per_chunk(self) -> float:
        """A READ and a launch, however small."""
    @property
    def convert_bytes_per_second(self) -> float:
        """Bytes of pages converted per second."""
    @property
    def direct_bytes_per_second(self) -> float:
        """Bytes of pages per second when the conversion itself reads the peer's memory."""
    @property
    def best_descriptor_bytes(self) -> float:
        """Length at which a descriptor runs at four fifths of `bytes_per_second`."""
    def __eq__(self, other: object, /) -> bool: ...

@final
class Chunk:
    """What one READ moves (one launch, where nothing is read): `num_layers` layers from
    `first_layer` in the order of the local cache, `num_pages` pages from `first_page` in run order.
    """

    @property
    def first_layer(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def first_page(self) -> int: ...
    @property
    def num_pages(self) -> int: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@final
class Cut:
    """One way to fill slots: `group_layers` consecutive layers of up to `slot_pages` pages, laid
    out [layer position][page] densely. Group g of `num_groups` is layers [g*group_layers,
    (g+1)*group_layers).
    """

    @property
    def group_layers(self) -> int: ...
    @property
    def slot_pages(self) -> int: ...
    @property
    def num_groups(self) -> int: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@final
class Planner:
    """Plans one peer's requests: once per peer what is possible and how the slab is cut, per
    request what is fastest.

    `slab` is registered memory for raw pages: its registered extent, from its address, is cut into
    at most `num_slots` equal slots, which a request fills by one of `cuts`. Without a slab nothing
    is staged.
    `direct` says that the conversion can read the peer's memory, `in_place` that raw pages may land
    in the cache. `max_pages` are the pages per layer of the largest request.

    Raises `PlanError`: the sides do not belong together, as in `TransferPlan`; no placement is
    possible; the slab does not hold a page, or pages of the layers differ in size; a count is 0.
    """

    def __new__(
        cls,
        target: Sequence[Region],
        source: Sequence[Region],
        *,
        link: LinkModel,
        max_pages: int,
        slab: Region | None = None,
        num_slots: int = 4,
        direct: bool = False,
        in_place: bool = True,
    ) -> Planner: ...
    @property
    def placements(self) -> list[_Placement]:
        """The placements to choose from."""
    @property
    def converts(self) -> bool:
        """Whether the peer's pages have another format than the local ones."""
    @property
    def cuts(self) -> tuple[Cut, ...]:
        """The ways to fill a slot, each the fastest for some number of consecutive pages."""
    @property
    def num_slots(self) -> int: ...
    @property
    def slot_stride_pages(self) -> int:
        """Pages from one slot to the next. It depends on the slab, `num_slots` and the page's
        bytes only, so peers with pages of one size share the slots of one slab."""
    @property
    def slot_bytes(self) -> int:
        """Bytes from one slot to the next."""
    def rows(self, placement: _Placement) -> DescriptorRows:
        """Descriptor rows to prepare once, "in_place" or "staged". Raises `PlanError` for a
        placement that is not possible.
        """
    def slab_regions(self, cut: int, group: int) -> tuple[Region, ...]:
        """The slab as raw pages of one group of layers by the cut of this index, one region per
        layer: page p of slot s is block ``s*slot_stride_pages + p`` of each. Raises `PlanError` for
        no such cut or group, or no slab.
        """
    def plan(self, runs: Runs) -> RequestPlan:
        """The placement and order with the least predicted time, and the chunks.

        Raises `PlanError`: more than `max_pages` pages; a block outside a side; more descriptors
        than int32 ids can name.
        """
    def explain(self) -> str:
        """What was fixed for this peer, in words."""

@final
class RequestPlan:
    """How one request moves. Its chunks tile layers x pages exactly once."""

    @property
    def placement(self) -> _Placement: ...
    @property
    def cut(self) -> int:
        """Index among the planner's cuts of how slots are filled; 0 where nothing is staged."""
    @property
    def order(self) -> _Order:
        """Of the descriptors of a READ: "by_row", or "by_page" so that neighbours do not merge."""
    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """Direct and in place: one, the whole request. None for a request without pages."""
    @property
    def num_pages(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def num_descriptors(self) -> int:
        """Before merging, of all chunks; 0 for direct."""
    @property
    def num_merged_descriptors(self) -> int:
        """After NIXL (>= 1.5) merged neighbours."""
    @property
    def predicted_seconds(self) -> float:
        """Of reading and converting."""
    def descriptor_ids(
        self, chunk: int, slot: int = 0
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """(local ids, remote ids) of chunk number `chunk`, read into slot `slot` when staged.

        Raises `PlanError` for no such chunk or slot, and for a direct request.
        """
    def explain(self) -> str:
        """Each choice in words, with its predicted time and those that were not taken."""
