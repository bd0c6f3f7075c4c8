"""Which page formats an untagged engine's geometry would fit. Lengths alone say no more."""

from __future__ import annotations

from collections import Counter

import msgspec

from kvpd._kvpd import PageFormat, cache_regions
from kvpd.cli.formats.known import KNOWN
from kvpd.errors import FormatError, RegionError
from kvpd.vllm.published import StockMetadata

# Head sizes of models; any divisor would fit as well.
HEAD_DIMS = (64, 72, 80, 96, 112, 128, 160, 192, 256, 512)
# Proving a format visits every element; a hostile page could make it long.
_MAX_PAGE_BYTES = 4 << 20
# One element type stands for all of its size.
_ELEMENT_TYPES = {16: "bfloat16", 8: "uint8", 32: "float32"}


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """Formats that keep pages of some shapes in exactly the published regions.

    Attributes:
        formats: names as in ``kvpd formats``.
        element_bits: size of an element.
        shapes: (KV heads of the rank, head size).
    """

    formats: list[str]
    element_bits: int
    shapes: list[tuple[int, int]]


def fits(metadata: StockMetadata) -> list[Fit]:
    """Try every known format with every usual head size, by the regions it would be kept in.

    Of formats that place every element of a shape alike the first stands for all.
    """
    published = Counter(zip(metadata.block_lens, metadata.block_strides, strict=True))
    names = metadata.region_names
    if not names:
        return []
    layers = list(dict.fromkeys(names))
    page_bytes = sum(
        length for length, name in zip(metadata.block_lens, names, strict=True) if name == layers[0]
    )
    if not 0 < page_bytes <= _MAX_PAGE_BYTES:
        return []
    fitting: dict[tuple[int, tuple[int, int]], dict[PageFormat, str]] = {}
    for bits, dtype in _ELEMENT_TYPES.items():
        for head_dim in HEAD_DIMS:
            heads, rest = divmod(page_bytes, 2 * metadata.block_size * head_dim * bits // 8)
            for known in KNOWN if heads and not rest else ():
                try:
                    format = known.format(heads, metadata.block_size, head_dim, dtype)
                    if _regions(format, metadata, layers) == published:
                        found = fitting.setdefault((bits, (heads, head_dim)), {})
                        found.setdefault(format, known.name)
                except (FormatError, RegionError):
                    continue
    shapes: dict[tuple[int, tuple[str, ...]], list[tuple[int, int]]] = {}
    for (bits, shape), formats in fitting.items():
        shapes.setdefault((bits, tuple(formats.values())), []).append(shape)
    return [
        Fit(formats=list(formats), element_bits=bits, shapes=of_formats)
        for (bits, formats), of_formats in shapes.items()
    ]


def _regions(
    format: PageFormat, metadata: StockMetadata, layers: list[str]
) -> Counter[tuple[int, int]]:
    regions = cache_regions(
        format,
        metadata.kv_cache_layout,
        address=0,
        num_blocks=max(metadata.num_blocks, 1),
        layers=layers,
    )
    return Counter((region.block_bytes, region.block_stride_bytes) for region in regions)
