"""`TritonWriter`: the plan of a batch, and the launch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from kvpd.convert.axes import VECTOR_BYTES
from kvpd.errors import MissingDependencyError, WriteError
from kvpd.write.places import places_of
from kvpd.write.plan import Work, WritePlan, WriteTuning, are_vectors, plan_write
from kvpd.write.writer import Batch, Writer

try:
    import triton
except ImportError as error:
    raise MissingDependencyError(
        "writing on a GPU needs triton: pip install 'kvpd[convert]'",
        code="missing-dependency",
        field="triton",
        got="not installed",
        expected="kvpd[convert]",
    ) from error

from kvpd.write.kernels import write_kernel

if TYPE_CHECKING:
    from kvpd.convert import Pages

# Up to so many rows: as many programs as there can be, each short.
_FEW_ROWS = 32
# From here on there are programs enough without one per token.
_MANY_ROWS = 256
_HIP = torch.version.hip is not None

_Kind = tuple[Any, ...]
# By format, work, tuning and device; shared by all layers.
_plans: dict[_Kind, WritePlan] = {}
_compiled: dict[_Kind, Any] = {}


def tuning_for(num_rows: int, element_bytes: int, *, hip: bool) -> WriteTuning:
    """How a batch is cut into programs.

    Args:
        num_rows: its rows.
        element_bytes: width of the pages' elements.
        hip: for an AMD GPU, whose warps have twice as many threads.
    """
    wider = 2 if hip else 1
    if num_rows <= _FEW_ROWS:
        return WriteTuning(num_rows=1, num_heads=2 * wider, num_warps=1)
    if num_rows <= _MANY_ROWS:
        return WriteTuning(num_rows=1, num_heads=4 * wider, num_warps=1)
    # A vector of tokens, so that pages which keep tokens together take it in one store. To make
    # 8-bit floats takes threads longer than to move them (measured on an H200).
    num_warps = 4 if element_bytes == 1 and not hip else 1
    return WriteTuning(VECTOR_BYTES // element_bytes, num_heads=1, num_warps=num_warps)


class TritonWriter(Writer):
    """One launch a call."""

    def __init__(self, pages: Pages, layer: int, tuning: WriteTuning | None = None) -> None:
        """Check the memory.

        Raises:
            WriteError: no GPU, or pages that 16-byte stores cannot reach.
        """
        super().__init__(pages, layer)
        self._tuning = tuning
        self._places = tuple(
            number for place in places_of(pages, layer) for number in vars(place).values()
        )
        device = pages.device
        # Decided when the kernel was imported, not by the environment of this call.
        self._interpreted = not isinstance(write_kernel, triton.JITFunction)
        if device.type != "cuda" and not self._interpreted:
            raise WriteError(
                f"the kernels run on a GPU, the pages are on {device}",
                code="no-gpu",
                field="device",
                got=device,
                expected="cuda",
            )
        self._device_index = device.index

    def _checked(self, batch: Batch) -> Work:
        work = super()._checked(batch)
        if are_vectors(self._component.channels, work.rotary_dim):
            _check_vectors(batch)
        return work

    def _run(self, batch: Batch, work: Work) -> None:
        if self._interpreted or self._device_index == torch.cuda.current_device():
            self._launch(batch, work)
        else:
            # Triton launches on the current device, wherever the pointers lead.
            with torch.cuda.device(self._device_index):
                self._launch(batch, work)

    def _launch(self, batch: Batch, work: Work) -> None:
        num_slots = batch.slots.shape[0]
        num_rows = num_slots if batch.rotation is None else batch.key.shape[0]
        if not num_rows:
            return
        tuning = self._tuning or tuning_for(num_rows, self._component.element_bytes, hip=_HIP)
        kind = (self.pages.format, work, tuning, batch.slots.dtype, self._device_index)
        plan = _plans.get(kind)
        if plan is None:
            plan = _plans[kind] = plan_write(self.pages.format, work, tuning)
        key, value = batch.key, batch.value
        # What the plan does not ask for is never looked at.
        query = key if batch.query is None else batch.query
        query_out = query if batch.query_out is None else batch.query_out
        key_out = key if batch.key_out is None else batch.key_out
        rotation, norm, scales = batch.rotation, batch.norm, batch.scales
        tensors = (
            query,
            key,
            value,
            query_out,
            key_out,
            batch.slots if rotation is None else rotation.positions,
            key if rotation is None else rotation.cos_sin,
            batch.slots,
            key if norm is None else norm.query_weight,
            key if norm is None else norm.key_weight,
            key if scales is None or scales.query is None else scales.query,
            key if scales is None else scales.key,
            key if scales is None else scales.value,
        )
        numbers = (
            0.0 if norm is None else norm.epsilon,
            num_rows,
            num_slots,
            query.stride(0),
            key.stride(0),
            value.stride(0),
            query_out.stride(0),
            key_out.stride(0),
            0 if rotation is None else rotation.cos_sin.stride(0),
            *self._places,
        )
        grid = (-(-num_rows // plan.num_rows), plan.num_query_groups + 2 * plan.num_kv_groups, 1)
        compiled = _compiled.get(kind)
        if compiled is not None and not self._interpreted:
            # Triton's own call looks it up by all arguments again, which takes longer than the
            # kernel. What was compiled takes placeholders for its constants.
            addresses = [tensor.data_ptr() for tensor in tensors]
            compiled[grid](*addresses, *numbers, plan, _HIP)
            return
        _compiled[kind] = write_kernel[grid](
            *tensors,
            *numbers,
            PLAN=plan,
            HIP=_HIP,
            num_warps=tuning.num_warps,
        )


def _check_vectors(batch: Batch) -> None:
    """Refuse rows that vector accesses would miss: the kernel is compiled for aligned ones."""
    tensors: dict[str, torch.Tensor | None] = {
        name: getattr(batch, name) for name in ("query", "key", "value", "query_out", "key_out")
    }
    if batch.rotation is not None:
        tensors["rotation.cos_sin"] = batch.rotation.cos_sin
    if batch.norm is not None:
        tensors["norm.query_weight"] = batch.norm.query_weight
        tensors["norm.key_weight"] = batch.norm.key_weight
    for field, tensor in tensors.items():
        if tensor is None:
            continue
        # Eight elements, whatever their size.
        size = tensor.element_size()
        vector_bytes = 8 * size
        row_bytes = tensor.stride(0) * size if tensor.dim() > 1 and tensor.shape[0] > 1 else 0
        if tensor.data_ptr() % vector_bytes or row_bytes % vector_bytes:
            raise WriteError(
                f"{field} begins at {tensor.data_ptr():#x} with rows {row_bytes} bytes apart",
                code="unaligned",
                field=field,
                got=f"{tensor.data_ptr():#x}, {row_bytes}",
                expected=f"multiples of {vector_bytes}",
            )
