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
# Up to so many programs fetch their ids from host memory, in a microsecond, where an upload costs
# the host tens of them. Resident programs fetch any number: they wait for a link anyway.
_MAX_HOST_READS = 256


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
        # Numbers, where tensors would each be asked for their address at every launch.
        tables = (self._source_table, self._target_table)
        self._table_addresses = tuple(table.data_ptr() for table in tables)
        self._counters_address = self._counters.data_ptr()
        # What was compiled takes placeholders for its constants.
        self._placeholders = tuple(self.constants.values())

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

    def enqueue_with_host_ids(
        self, ids: torch.Tensor, num_ids: int, stream: torch.cuda.Stream
    ) -> bool:
        """As `Conversion.enqueue_with_host_ids`: on CUDA, for few ids or resident programs.

        Raises:
            ConversionError: more ids than one launch takes.
        """
        few = num_ids * self._work_per_id <= _MAX_HOST_READS or self._num_programs is not None
        compiled = self._compiled.get(torch.int32)
        # On ROCm it has not been tried. Triton launches on the current device.
        if compiled is None or not few or torch.version.hip is not None:
            return False
        if self._device_index != torch.cuda.current_device():
            return False
        target = ids.data_ptr()
        source = target if self.in_place else target + num_ids * ids.element_size()
        self._relaunch(compiled, source, target, num_ids, stream=stream.cuda_stream)
        return True

    def _run(self, source_ids: torch.Tensor, target_ids: torch.Tensor) -> None:
        if self._interpreted or self._device_index == torch.cuda.current_device():
            self._launch(source_ids, target_ids)
        else:
            # Triton launches on the current device, wherever the pointers lead.
            with torch.cuda.device(self._device_index):
                self._launch(source_ids, target_ids)

    def _launch(self, source_ids: torch.Tensor, target_ids: torch.Tensor) -> None:
        num_ids = source_ids.numel()
        compiled = self._compiled.get(source_ids.dtype)
        if compiled is not None:
            self._relaunch(compiled, source_ids.data_ptr(), target_ids.data_ptr(), num_ids)
            return
        num_programs, num_work = self._grid(num_ids)
        # Nothing but the dtype of the ids tells two calls of one conversion apart.
        self._compiled[source_ids.dtype] = convert_kernel[(num_programs,)](
            self._source_table,
            self._target_table,
            source_ids,
            target_ids,
            self._counters,
            num_ids,
            num_work,
            **self.constants,
            num_warps=self.num_warps,
        )

    def _relaunch(
        self, compiled: Any, source: int, target: int, num_ids: int, **options: Any
    ) -> None:
        """Launch what Triton compiled, with the ids' addresses.

        Triton's own call looks it up by all arguments again, which takes longer than the kernel for
        a few pages.
        """
        num_programs, num_work = self._grid(num_ids)
        compiled[(num_programs, 1, 1)](
            *self._table_addresses,
            source,
            target,
            self._counters_address,
            num_ids,
            num_work,
            *self._placeholders,
            **options,
        )

    def _grid(self, num_ids: int) -> tuple[int, int]:
        """(programs, work items) of so many ids."""
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
        return programs, num_work


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
