"""Which writer runs for which memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from kvpd.errors import WriteError
from kvpd.write.reference import ReferenceWriter

if TYPE_CHECKING:
    from kvpd.convert import Pages
    from kvpd.write.plan import WriteTuning
    from kvpd.write.writer import Writer

Implementation = Literal["auto", "reference", "triton"]


def prepare(
    pages: Pages,
    layer: int = 0,
    *,
    implementation: Implementation = "auto",
    tuning: WriteTuning | None = None,
) -> Writer:
    """Build the writer of one layer of a cache, once.

    Args:
        pages: the cache.
        layer: which of its layers.
        implementation: "auto" takes Triton for pages on a GPU and plain torch elsewhere.
        tuning: how Triton cuts a batch; None chooses by its number of tokens. The reference takes
            none.

    Raises:
        WriteError: the format or the memory breaks a contract of the implementation.
        MissingDependencyError: Triton is needed and not installed.
    """
    if implementation == "auto":
        implementation = "reference" if pages.device.type == "cpu" else "triton"
    if implementation == "reference":
        return ReferenceWriter(pages, layer)
    if implementation == "triton":
        # Deferred: importing triton takes a second and host-only users have none.
        from kvpd.write.launch import TritonWriter

        return TritonWriter(pages, layer, tuning)
    raise WriteError(
        f"unknown implementation {implementation!r}",
        code="implementation",
        field="implementation",
        got=implementation,
        expected="auto, reference or triton",
    )
