"""`TritonConversion`: tables and tuning of one cache, and the launch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from kvpd.convert.axes import VECTOR_BYTES
from kvpd.convert.conversion import Conversion
from kvpd.convert.plan import IN_PLACE, OUT_OF_PLACE, Tuning
from kvpd.convert.specialise import specialise
from kvpd.errors import ConversionError, MissingDependencyError

try:
    import triton
except ImportError as error:
    raise MissingDependencyError(
        "conversion on a GPU needs triton: pip install 'kvpd[convert]'",
        code="missing-dependency",
        field="triton",
        got="not installed",
        expected="kvpd[convert]",
    ) from error

from kvpd.convert.kernels import convert_kernel

if TYPE_CHECKING:
    from kvpd.convert.pages import Pages

# Work items and the step between a program's items are 32-bit numbers in the kernel.
_MAX_WORK = 2**30


class TritonConversion(Conversion):
    """All layers in one launch, each byte read once and written once in 16-byte accesses.

    The call allocates nothing, does not synchronise, and may be captured in a CUDA graph. Calls of
    one conversion must be ordered by streams: those in place of long pages share counters.
    """

    def __init__(self, source: Pages, target: Pages, tuning: Tuning | None = None) -> None:
        """Check the memory, plan the kernel and upload the tables.

        Raises:
            ConversionError: no GPU, pieces of unequal length, or addresses, strides, offsets that
                16-byte accesses cannot reach.
        """
        super().__init__(source, target)
        default = IN_PLACE if self.in_place else OUT_OF_PLACE
        self.tuning = tuning if tuning is not None else default
        device = target.device
        # Decided when the kernel was imported, not by the environment of this call.
        self._interpreted = not isinstance(convert_kernel, triton.JITFunction)
        if device.type != "cuda" and not self._interpreted:
            raise ConversionError(
                f"the kernels run on a GPU, the pages are on {device}",
                code="no-gpu",
                field="device",
                got=device,
                expected="cuda",
            )
        specialisation = specialise(
            source.format,
            target.format,
            self.tuning,
            in_place=self.in_place,
            source_piece_bytes=_piece_bytes(source, "source"),
            target_piece_bytes=_piece_bytes(target, "target"),
            hip=torch.version.hip is not None,
            is_parallel=not self._interpreted,
        )
        self.plan = specialisation.plan
        self.constants = specialisation.constants
        self.num_warps = specialisation.num_warps
        self._source_table = _table(source)
        self._target_table = _table(target)
        self._num_programs = self.tuning.num_programs
        num_parts = specialisation.num_parts
        meets = self.in_place and num_parts > 1
        if meets and num_parts > _num_multiprocessors(device):
            # The parts of a page wait for each other: they must be resident together.
            raise ConversionError(
                f"a page has {num_parts} parts, the GPU {_num_multiprocessors(device)} "
                "multiprocessors",
                code="too-many-parts",
                field="part_bytes",
                got=num_parts,
                expected=f"at most {_num_multiprocessors(device)}",
            )
        self._work_per_id = source.num_layers * num_parts
        # One request's ids are distinct, so there are never more than blocks, padding aside.
        self._max_ids = target.num_blocks if meets else _MAX_WORK // self._work_per_id
        num_counters = 1 + source.num_layers * self._max_ids if meets else 1
        self._counters = torch.zeros(num_counters, dtype=torch.int32, device=device)
        self._device_index = device.index
        # By dtype of the ids; None from the interpreter, which compiles nothing.
        self._compiled: dict[torch.dtype, Any] = {}

    def warm_up(self) -> None:
        """As `Conversion.warm_up`.

        Raises:
            ConversionError: triton cannot compile it.
        """
        try:
            super().warm_up()
        except triton.errors.TritonError as error:
            raise ConversionError(
                f"triton {triton.__version__} cannot compile the kernel: {error}",
                code="no-kernel",
                field="triton",
                got=triton.__version__,
                expected="3.6 or 3.7",
            ) from error

    def _run(self, source_ids: torch.Tensor, target_ids: torch.Tensor) -> None:
        num_ids = source_ids.numel()
        if num_ids > self._max_ids:
            raise ConversionError(
                f"{num_ids} ids in one call",
                code="too-many-ids",
                field="source_ids",
                got=num_ids,
                expected=f"<= {self._max_ids}",
            )
        num_work = num_ids * self._work_per_id
        programs = num_work if self._num_programs is None else min(num_work, self._num_programs)
        if self._interpreted or self._device_index == torch.cuda.current_device():
            self._launch(programs, source_ids, target_ids, num_ids, num_work)
        else:
            # Triton launches on the current device, wherever the pointers lead.
            with torch.cuda.device(self._device_index):
                self._launch(programs, source_ids, target_ids, num_ids, num_work)

    def _launch(
        self,
        programs: int,
        source_ids: torch.Tensor,
        target_ids: torch.Tensor,
        num_ids: int,
        num_work: int,
    ) -> None:
        arguments = (
            self._source_table,
            self._target_table,
            source_ids,
            target_ids,
            self._counters,
            num_ids,
            num_work,
        )
        compiled = self._compiled.get(source_ids.dtype)
        if compiled is None:
            # Nothing but the dtype of the ids tells two calls of one conversion apart.
            self._compiled[source_ids.dtype] = convert_kernel[(programs,)](
                *arguments, **self.constants, num_warps=self.num_warps
            )
        else:
            # What Triton compiled, without looking it up by all arguments again: that takes longer
            # than the kernel for a few pages. Constants are placeholders here.
            compiled[(programs, 1, 1)](*arguments, *self.constants.values())


def _piece_bytes(pages: Pages, side: str) -> int:
    """The one length of all pieces of a side; all addresses and strides are checked on the way."""
    first = pages.layers[0]
    piece_bytes = first[0].shape[1]
    for index, pieces in enumerate(pages.layers):
        found = [piece.shape[1] for piece in pieces]
        if found != [piece_bytes] * len(first):
            raise ConversionError(
                f"{side}: layer {index} is in pieces of {found} bytes; the kernels need every page "
                f"in {len(first)} pieces of {piece_bytes}",
                code="unequal-pieces",
                field=f"{side}.layers[{index}]",
                got=found,
                expected=[piece_bytes] * len(first),
            )
        for piece in pieces:
            stride = piece.stride(0)
            facts = {"address": piece.data_ptr(), "stride": stride, "piece length": piece_bytes}
            for name, value in facts.items():
                if value % VECTOR_BYTES:
                    raise ConversionError(
                        f"{side}: layer {index} has {name} {value}, no multiple of {VECTOR_BYTES}",
                        code="unaligned",
                        field=f"{side}.layers[{index}]",
                        got=value,
                        expected=f"a multiple of {VECTOR_BYTES}",
                    )
    return piece_bytes


def _table(pages: Pages) -> torch.Tensor:
    """int64 [num_layers, num_pieces, 2] on the pages' device: address, block stride in bytes."""
    rows = [[[piece.data_ptr(), piece.stride(0)] for piece in pieces] for pieces in pages.layers]
    return torch.tensor(rows, dtype=torch.int64, device=pages.device)


def _num_multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
