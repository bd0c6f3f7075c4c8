"""`Pages`: the pages of a cache or a slab, as byte views of the memory they live in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from kvpd.errors import ConversionError

if TYPE_CHECKING:
    from kvpd._kvpd import PageFormat, Region


@dataclass(frozen=True)
class Pages:
    """Blocks of every layer, in one page format, viewed in place.

    Attributes:
        format: where each element lies inside a page.
        layers: ``layers[layer][piece]`` is a uint8 view [num_blocks, piece_bytes] with the block
            stride of the memory it views and ``stride(1) == 1``. The pieces of a page in order are
            the page's bytes, planes concatenated in plane order.

    Raises:
        ConversionError: a piece is no such view, or the pieces of a layer are not a page long.
    """

    format: PageFormat
    layers: tuple[tuple[torch.Tensor, ...], ...]

    def __post_init__(self) -> None:
        if not self.layers:
            raise ConversionError(
                "pages need at least one layer",
                code="no-layers",
                field="layers",
                got=0,
                expected=">= 1",
            )
        device = self.device
        for index, pieces in enumerate(self.layers):
            for piece in pieces:
                _check_piece(piece, f"layers[{index}]", device)
            num_bytes = sum(piece.shape[1] for piece in pieces)
            if num_bytes != self.format.page_bytes:
                raise ConversionError(
                    f"layer {index} holds {num_bytes} bytes per block, "
                    f"a page of {self.format.name} has {self.format.page_bytes}",
                    code="page-bytes",
                    field=f"layers[{index}]",
                    got=num_bytes,
                    expected=self.format.page_bytes,
                )

    @classmethod
    def of(
        cls, format: PageFormat, regions: Sequence[Region], storages: Sequence[torch.Tensor]
    ) -> Pages:
        """Views of `regions` inside the memory of `storages`.

        Regions of one layer are those with equal ``layers``; layers come in order of first
        appearance. Each span that a region holds becomes one piece.

        Args:
            format: the format every region must be tagged with.
            regions: strided memory; addresses are those of `storages`' bytes.
            storages: tensors whose untyped storages contain the regions.

        Raises:
            ConversionError: a region is untagged, tagged otherwise, outside every storage, or the
                regions of a layer do not hold each byte of a page exactly once.
        """
        grouped: dict[tuple[str, ...], list[Region]] = {}
        for region in regions:
            if region.format != format:
                got = region.format.name if region.format is not None else "untagged"
                raise ConversionError(
                    f"region at {region.address:#x} holds {got}, not {format.name}",
                    code="region-format",
                    field="regions",
                    got=got,
                    expected=format.name,
                )
            grouped.setdefault(region.layers, []).append(region)
        layers = tuple(_layer(format, group, storages) for group in grouped.values())
        return cls(format, layers)

    def seen_as(self, format: PageFormat) -> Pages:
        """The same memory read as pages of another format of equal length.

        This is the source of an in-place conversion: raw remote pages that landed in local blocks.
        """
        return Pages(format, self.layers)

    @property
    def device(self) -> torch.device:
        """The device all pieces are on."""
        for pieces in self.layers:
            for piece in pieces:
                return piece.device
        raise ConversionError(
            "a layer has no pieces", code="no-pieces", field="layers", got=0, expected=">= 1"
        )

    @property
    def num_layers(self) -> int:
        """Layers, one page per block each."""
        return len(self.layers)

    @cached_property
    def num_blocks(self) -> int:
        """Blocks that every piece has."""
        return min(piece.shape[0] for piece in self.pieces())

    def pieces(self) -> Iterator[torch.Tensor]:
        """Every piece of every layer, layer by layer."""
        for pieces in self.layers:
            yield from pieces


def _check_piece(piece: torch.Tensor, field: str, device: torch.device) -> None:
    # Any other view would be read or written at other bytes than the region's own.
    found = {"dtype": str(piece.dtype), "rank": str(piece.dim()), "device": str(piece.device)}
    wanted = {"dtype": str(torch.uint8), "rank": "2", "device": str(device)}
    for name, value in wanted.items():
        if found[name] != value:
            raise ConversionError(
                f"{field}: a piece has {name} {found[name]}, expected {value}",
                code=f"piece-{name}",
                field=field,
                got=found[name],
                expected=value,
            )
    num_blocks, piece_bytes = piece.shape
    stride = piece.stride(0)
    dense = piece_bytes > 0 and (piece.stride(1) == 1 or piece_bytes == 1)
    if not dense or (num_blocks > 1 and stride < piece_bytes):
        raise ConversionError(
            f"{field}: shape {tuple(piece.shape)} with strides {piece.stride()} is no sequence of "
            "disjoint byte ranges",
            code="piece-strides",
            field=field,
            got=piece.stride(),
            expected=f"(>= {piece_bytes}, 1)",
        )


def _layer(
    format: PageFormat, regions: Sequence[Region], storages: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    starts = [0]
    for num_bytes in format.plane_bytes:
        starts.append(starts[-1] + num_bytes)
    found: list[tuple[int, torch.Tensor]] = []
    for region in regions:
        inside = 0
        for span in region.planes:
            view = _view(region, inside, span.num_bytes, storages)
            found.append((starts[span.plane] + span.start_bytes, view))
            inside += span.num_bytes
    found.sort(key=lambda item: item[0])
    position = 0
    for page_offset, view in found:
        if page_offset != position:
            raise ConversionError(
                f"layer {regions[0].layers}: page bytes from {min(position, page_offset)} are held "
                f"{'twice' if page_offset < position else 'by no region'}",
                code="layer-cover",
                field="regions",
                got=page_offset,
                expected=position,
            )
        position += view.shape[1]
    if position != format.page_bytes:
        raise ConversionError(
            f"layer {regions[0].layers}: page bytes from {position} are held by no region",
            code="layer-cover",
            field="regions",
            got=position,
            expected=format.page_bytes,
        )
    num_blocks = min(view.shape[0] for _, view in found)
    return tuple(view[:num_blocks] for _, view in found)


def _view(
    region: Region, inside_bytes: int, num_bytes: int, storages: Sequence[torch.Tensor]
) -> torch.Tensor:
    """[num_blocks, num_bytes] of each block from byte `inside_bytes` on."""
    first = region.address + inside_bytes
    end = first + (region.num_blocks - 1) * region.block_stride_bytes + num_bytes
    for tensor in storages:
        storage = tensor.untyped_storage()
        start = storage.data_ptr()
        if start <= first and end <= start + storage.nbytes():
            # set_ on the storage itself: a reshape or an indexed copy would look the same to
            # readers and leave the cache untouched.
            view = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            view.set_(
                storage,
                first - start,
                (region.num_blocks, num_bytes),
                (region.block_stride_bytes, 1),
            )
            if view.data_ptr() != first:
                raise ConversionError(
                    f"a view of {first:#x} came out at {view.data_ptr():#x}",
                    code="view-copied",
                    field="storages",
                    got=hex(view.data_ptr()),
                    expected=hex(first),
                )
            return view
    raise ConversionError(
        f"bytes [{first:#x}, {end:#x}) of a region are in none of {len(storages)} storages",
        code="outside-storage",
        field="regions",
        got=f"[{first:#x}, {end:#x})",
        expected="inside one storage",
    )
