"""What a conversion is, and the contracts every implementation checks before it runs."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import torch
from numpy.typing import NDArray

from kvpd.convert.pages import Pages
from kvpd.errors import ConversionError

_ID_DTYPES = (torch.int32, torch.int64)
# Rows of the overlap check done at a time: caches of many regions would need gigabytes otherwise.
_CHUNK = 256


class Conversion(ABC):
    """Pages of `source` become pages of `target`, for a cache whose tables are built once.

    ``conversion(source_ids, target_ids)`` converts page ``source_ids[i]`` of every layer into page
    ``target_ids[i]``. A pair with a negative id on either side is padding and skipped. Ids must be
    distinct on the target side; in place, both sides are one tensor. The call enqueues work on the
    current stream of the device and returns. Converting in place is not idempotent: each page
    exactly once.
    """

    def __init__(self, source: Pages, target: Pages) -> None:
        """Checks devices, layer counts and overlap.

        Raises:
            ConversionError: `source` and `target` share some bytes without being the same pages.
        """
        for field, got, expected in (
            ("device", source.device, target.device),
            ("num_layers", source.num_layers, target.num_layers),
        ):
            if got != expected:
                raise ConversionError(
                    f"source and target differ in {field}: {got} and {expected}",
                    code="pages-differ",
                    field=field,
                    got=got,
                    expected=expected,
                )
        self.source = source
        self.target = target
        self.in_place = _same_bytes(source, target)
        _check_disjoint(target, None)
        if not self.in_place:
            _check_disjoint(target, source)

    def __call__(self, source_ids: torch.Tensor, target_ids: torch.Tensor) -> None:
        """Convert; ids are 1-D int32 or int64 on the pages' device, equally long.

        Raises:
            ConversionError: the ids break this contract.
        """
        self._check_ids(source_ids, target_ids)
        if source_ids.numel():
            self._run(source_ids, target_ids)

    def enqueue_with_host_ids(
        self, ids: torch.Tensor, num_ids: int, stream: torch.cuda.Stream
    ) -> bool:
        """Convert as a call does, but with ids that stay in host memory.

        Args:
            ids: int32, pinned: `num_ids` of the target, then, out of place, as many of the source,
                checked by whoever calls. They may change when the stream has passed this.
            stream: where to run.

        Returns:
            False where ids are better uploaded first; nothing was enqueued.
        """
        return False

    @abstractmethod
    def _run(self, source_ids: torch.Tensor, target_ids: torch.Tensor) -> None:
        """Convert; the ids are checked and not empty."""

    def warm_up(self) -> None:
        """Do now what first calls would do late (compile, load), by converting one padding id.

        Waits for it, so that calls on any stream may follow.
        """
        for dtype in _ID_DTYPES:
            ids = torch.full((1,), -1, dtype=dtype, device=self.target.device)
            self(ids, ids)
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)

    def _check_ids(self, source_ids: torch.Tensor, target_ids: torch.Tensor) -> None:
        device = self.target.device
        for field, ids in (("source_ids", source_ids), ("target_ids", target_ids)):
            if ids.dim() != 1 or ids.dtype not in _ID_DTYPES or ids.device != device:
                raise ConversionError(
                    f"{field} is {ids.dtype}{list(ids.shape)} on {ids.device}",
                    code="ids-kind",
                    field=field,
                    got=f"{ids.dtype}{list(ids.shape)} on {ids.device}",
                    expected=f"1-D int32 or int64 on {device}",
                )
            # A kernel steps through ids by their element size; a strided view would be misread.
            if ids.numel() > 1 and ids.stride(0) != 1:
                raise ConversionError(
                    f"{field} has stride {ids.stride(0)}",
                    code="ids-stride",
                    field=field,
                    got=ids.stride(0),
                    expected=1,
                )
        if source_ids.shape != target_ids.shape or source_ids.dtype != target_ids.dtype:
            raise ConversionError(
                f"source_ids is {source_ids.dtype}{list(source_ids.shape)}, "
                f"target_ids {target_ids.dtype}{list(target_ids.shape)}",
                code="ids-differ",
                field="source_ids",
                got=f"{source_ids.dtype}{list(source_ids.shape)}",
                expected=f"{target_ids.dtype}{list(target_ids.shape)}",
            )
        # In place, page a written while page b is still to be read needs a == b for every pair.
        # Values on a GPU cannot be seen without a synchronisation, identity can.
        if self.in_place and source_ids.data_ptr() != target_ids.data_ptr():
            raise ConversionError(
                "an in-place conversion takes one id tensor for both sides",
                code="in-place-ids",
                field="source_ids",
                got="two tensors",
                expected="the same tensor twice",
            )
        if device.type == "cpu":
            check_id_values(self, source_ids.numpy(), target_ids.numpy())


def without_padding(
    source_ids: torch.Tensor, target_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The ids, int64, of the pairs that are converted."""
    kept = (source_ids >= 0) & (target_ids >= 0)
    return source_ids[kept].long(), target_ids[kept].long()


def check_id_values(
    conversion: Conversion,
    source_ids: NDArray[np.signedinteger],
    target_ids: NDArray[np.signedinteger],
) -> None:
    """Refuse ids beyond the pages' blocks, and in place any pair of different ids.

    For ids the host can see: on CPU tensors, and before a queue uploads them.
    """
    for field, ids, num_blocks in (
        ("source_ids", source_ids, conversion.source.num_blocks),
        ("target_ids", target_ids, conversion.target.num_blocks),
    ):
        highest = int(np.maximum.reduce(ids, initial=-1))
        if highest >= num_blocks:
            raise ConversionError(
                f"{field} names block {highest} of {num_blocks}",
                code="id-range",
                field=field,
                got=highest,
                expected=f"< {num_blocks}",
            )
    if conversion.in_place and not np.array_equal(source_ids, target_ids):
        raise ConversionError(
            "in place, every page is converted where it lies: both sides take the same ids",
            code="in-place-ids",
            field="source_ids",
            got="different ids",
            expected="target_ids",
        )


def _same_bytes(source: Pages, target: Pages) -> bool:
    """Whether byte o of page b is the same memory on both sides, for all layers."""
    return [_geometry(piece) for piece in source.pieces()] == [
        _geometry(piece) for piece in target.pieces()
    ]


def _geometry(piece: torch.Tensor) -> tuple[int, int, int]:
    """(address, block stride, bytes): where a piece lies, whoever made the view."""
    return piece.data_ptr(), piece.stride(0), piece.shape[1]


def _check_disjoint(target: Pages, source: Pages | None) -> None:
    """Refuse target pieces that share bytes with source pieces, or with each other (None).

    Interleaved pieces (layers side by side in one block) span overlapping ranges without sharing
    a byte; with equal strides that is decided exactly, otherwise they are refused.
    """
    others = target if source is None else source
    a = np.array([(*_geometry(p), p.shape[0]) for p in target.pieces()], dtype=np.int64)
    b = np.array([(*_geometry(p), p.shape[0]) for p in others.pieces()], dtype=np.int64)
    for first in range(0, len(a), _CHUNK):
        shared = _shared(a[first : first + _CHUNK], b)
        if source is None:
            rows = np.arange(len(shared))
            shared[rows, first + rows] = False
        if shared.any():
            row, column = (int(i) for i in np.argwhere(shared)[0])
            raise ConversionError(
                f"target piece {first + row} at {int(a[first + row, 0]):#x} shares bytes with "
                f"{'target' if source is None else 'source'} piece {column} at "
                f"{int(b[column, 0]):#x}",
                code="pages-overlap",
                field="target",
                got=hex(int(b[column, 0])),
                expected="disjoint bytes, or exactly the same pages",
            )


def _shared(a: NDArray[np.int64], b: NDArray[np.int64]) -> NDArray[np.bool_]:
    """[len(a), len(b)] whether two pieces (address, stride, bytes, blocks) may share a byte."""
    end_a = a[:, 0] + (a[:, 3] - 1) * a[:, 1] + a[:, 2]
    end_b = b[:, 0] + (b[:, 3] - 1) * b[:, 1] + b[:, 2]
    ranges_meet = (a[:, None, 0] < end_b[None, :]) & (b[None, :, 0] < end_a[:, None])
    stride = np.maximum(a[:, None, 1], 1)
    phase = (b[None, :, 0] - a[:, None, 0]) % stride
    interleaved = (
        (a[:, None, 1] == b[None, :, 1])
        & (phase >= a[:, None, 2])
        & (phase + b[None, :, 2] <= stride)
    )
    shared: NDArray[np.bool_] = ranges_meet & ~interleaved
    return shared
