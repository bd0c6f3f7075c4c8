"""Converters that an attention backend brings itself, beside the page format it declares."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from kvpd.convert import register_converter
from kvpd.convert.registry import registered_converter

if TYPE_CHECKING:
    from kvpd._kvpd import PageFormat
    from kvpd.convert.registry import Prepare


@runtime_checkable
class Converts(Protocol):
    """What an attention backend outside vLLM defines, as a class method, to convert by itself."""

    def kvpd_converters(self, target: PageFormat) -> Sequence[tuple[PageFormat, Prepare]]:
        """Formats of a peer's pages that the backend makes its own pages of, each with how.

        Args:
            target: what the backend declared for its own pages.

        Returns:
            (format of the peer's pages, what builds the conversion from them into `target`) each.
            It need not be a permutation. A connector compares formats, it does not look into them:
            pages whose *values* differ must be declared with components of another name, or they
            are taken for equal.
        """


def register_converters(backends: Iterable[object], target: PageFormat) -> None:
    """Register what the backends bring; asking again for the same changes nothing.

    Raises:
        ConversionError: another converter has one of the pairs already.
    """
    for backend in backends:
        if not isinstance(backend, Converts):
            continue
        for source, prepare in backend.kvpd_converters(target):
            # Engines of one process share a backend and the registry.
            if registered_converter(source, target) != prepare:
                register_converter(source, target, prepare)
