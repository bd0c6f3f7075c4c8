"""Conversion in host memory: the core's permutation, over views of the pages."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from kvpd._kvpd import Permutation
from kvpd.convert.components import match_components
from kvpd.convert.conversion import Conversion, without_padding
from kvpd.convert.pages import Pages
from kvpd.errors import ConversionError


class HostConversion(Conversion):
    """Page by page through the caches of a core, in the calling thread."""

    def __init__(self, source: Pages, target: Pages) -> None:
        """Raises `ConversionError` as well for pages that are not in host memory."""
        super().__init__(source, target)
        if target.device.type != "cpu":
            raise ConversionError(
                f"host code converts host memory, the pages are on {target.device}",
                code="not-host-memory",
                field="device",
                got=target.device,
                expected="cpu",
            )
        match_components(source.format, target.format)  # names every difference
        self._permutation = Permutation(source.format, target.format)
        self._layers = [
            (None if self.in_place else _arrays(source), _arrays(target))
            for source, target in zip(source.layers, target.layers, strict=True)
        ]

    def _run(self, source_ids: torch.Tensor, target_ids: torch.Tensor) -> None:
        rows_in, rows_out = without_padding(source_ids, target_ids)
        for source, target in self._layers:
            self._permutation.convert(source, target, rows_in.numpy(), rows_out.numpy())


def _arrays(pieces: tuple[torch.Tensor, ...]) -> list[NDArray[np.uint8]]:
    """A layer's pieces as arrays; what begins where the last one ends belongs to it."""
    joined: list[torch.Tensor] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if last is not None and _goes_on(last, piece):
            shape = (piece.shape[0], last.shape[1] + piece.shape[1])
            joined[-1] = last.as_strided(shape, last.stride())
        else:
            joined.append(piece)
    return [piece.numpy() for piece in joined]


def _goes_on(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether in every block `second` is the bytes after `first`, in the same memory."""
    return (
        first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
        and first.data_ptr() + first.shape[1] == second.data_ptr()
        and first.shape[0] == second.shape[0]
        and first.stride() == second.stride()
    )
