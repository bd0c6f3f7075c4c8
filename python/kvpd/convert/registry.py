"""Which conversion runs for a pair of formats; others may register their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import torch

from kvpd.convert.conversion import Conversion
from kvpd.convert.host import HostConversion
from kvpd.convert.pages import Pages
from kvpd.convert.plan import Tuning
from kvpd.convert.reference import ReferenceConversion
from kvpd.errors import ConversionError

if TYPE_CHECKING:
    from kvpd._kvpd import PageFormat

Implementation = Literal["auto", "host", "reference", "triton"]
Prepare = Callable[[Pages, Pages], Conversion]

# A format equals every format that places all elements alike, whatever its name.
_converters: dict[tuple[PageFormat, PageFormat], Prepare] = {}


def register_converter(
    source_format: PageFormat, target_format: PageFormat, prepare: Prepare
) -> None:
    """Let `prepare(source, target)` build the conversions of this pair of formats.

    A registered converter need not be a permutation, and takes its pair before our own kernels do.
    A decoder that converts accepts peers of this pair.

    Raises:
        ConversionError: the pair has one already; two backends must not race for it.
    """
    key = (source_format, target_format)
    if key in _converters:
        raise ConversionError(
            f"{source_format.name} -> {target_format.name} has a registered converter",
            code="duplicate-converter",
            field="prepare",
            got=getattr(prepare, "__qualname__", type(prepare).__name__),
            expected="one converter per pair of formats",
        )
    _converters[key] = prepare


def registered_converter(source_format: PageFormat, target_format: PageFormat) -> Prepare | None:
    """What `register_converter` was given for this pair, or None."""
    return _converters.get((source_format, target_format))


def registered_pairs() -> tuple[tuple[PageFormat, PageFormat], ...]:
    """(source, target) of every registered converter, as `kvpd.negotiate` takes them."""
    return tuple(_converters)


def prepare(
    source: Pages,
    target: Pages,
    *,
    implementation: Implementation = "auto",
    tuning: Tuning | None = None,
) -> Conversion:
    """Build the conversion of one cache: tables and permutations, once.

    Of equal formats it is a gather: pages move as they are, but for bytes that are padding.

    Args:
        source: pages to read. In place, `target.seen_as(source_format)`.
        target: pages to write.
        implementation: "auto" takes a registered converter first, then Triton for pages on a GPU
            and the core for pages in host memory. "reference" is plain torch, on any device.
        tuning: how Triton cuts the work, e.g. `kvpd.convert.DIRECT` for a source on another GPU;
            None chooses by placement. The other implementations take none.

    Raises:
        ConversionError: the pair or the memory breaks a contract of the implementation.
        MissingDependencyError: Triton is needed and not installed.
    """
    if implementation == "auto":
        registered = registered_converter(source.format, target.format)
        if registered is not None:
            return registered(source, target)
        implementation = "host" if target.device.type == "cpu" else "triton"
    if implementation == "host":
        return HostConversion(source, target)
    if implementation == "reference":
        return ReferenceConversion(source, target)
    if implementation == "triton":
        # Deferred: importing triton takes a second and host-only users have none.
        from kvpd.convert.launch import TritonConversion

        return TritonConversion(source, target, tuning)
    raise ConversionError(
        f"unknown implementation {implementation!r}",
        code="implementation",
        field="implementation",
        got=implementation,
        expected="auto, host, reference or triton",
    )


def convert_pages(
    source: Pages,
    target: Pages,
    source_ids: torch.Tensor,
    target_ids: torch.Tensor,
    *,
    implementation: Implementation = "auto",
) -> None:
    """`prepare` and one call. To convert the same cache again, keep what `prepare` returns.

    Raises:
        ConversionError: the pair, the memory or the ids break a contract.
    """
    prepare(source, target, implementation=implementation)(source_ids, target_ids)
