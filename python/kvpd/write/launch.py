"""`TritonWriter`: the plan of a batch, and the launch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from kvpd.errors import MissingDependencyError, WriteError
from kvpd.write.places import places_of
from kvpd.write.plan import Work, WritePlan, WriteTuning, plan_write
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

# Few tokens: as many programs as there can be, each short. Many: whole vectors of tokens.
FEW = WriteTuning(num_rows=1, num_heads=4, num_warps=1)
MANY = WriteTuning(num_rows=16, num_heads=1, num_warps=4)
# From here on there are programs enough without a program per token.
MANY_ROWS = 256

_plans: dict[tuple[Any, ...], WritePlan] = {}


class TritonWriter(Writer):
    """One launch a call."""

    def __init__(self, pages: Pages, layer: int, tuning: WriteTuning | None = None) -> None:
        """Check the memory.

        Raises:
            WriteError: no GPU, or pages that 16-byte stores cannot reach.
        """
        super().__init__(pages, layer)
        self._tuning = tuning
        self._key_place, self._value_place = places_of(pages, layer)
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

    def _run(self, batch: Batch, work: Work) -> None:
        if self._interpreted or self._device_index == torch.cuda.current_device():
            self._launch(batch, work)
        else:
            # Triton launches on the current device, wherever the pointers lead.
            with torch.cuda.device(self._device_index):
                self._launch(batch, work)

    def _launch(self, batch: Batch, work: Work) -> None:
        num_rows, num_slots = batch.key.shape[0], batch.slots.numel()
        if batch.rotation is None:
            num_rows = num_slots
        tuning = self._tuning
        if tuning is None:
            tuning = FEW if num_rows < MANY_ROWS else MANY
        identity = (self.pages.format, work, tuning)
        plan = _plans.get(identity)
        if plan is None:
            plan = _plans[identity] = plan_write(self.pages.format, work, tuning)
        key, value = batch.key, batch.value
        # What the plan does not ask for is never looked at.
        query = key if batch.query is None else batch.query
        query_out = query if batch.query_out is None else batch.query_out
        key_out = key if batch.key_out is None else batch.key_out
        rotation, norm, scales = batch.rotation, batch.norm, batch.scales
        if plan.has_vectors:
            _check_vectors(query=query, key=key, value=value, query_out=query_out, key_out=key_out)
            if rotation is not None:
                _check_vectors(cos_sin=rotation.cos_sin)
            if norm is not None:
                _check_vectors(query_weight=norm.query_weight, key_weight=norm.key_weight)
        blocks = -(-num_rows // plan.num_rows)
        if not blocks:
            return
        write_kernel[(blocks, plan.num_query_groups + 2 * plan.num_kv_groups)](
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
            0.0 if norm is None else norm.epsilon,
            num_rows,
            num_slots,
            query.stride(0),
            key.stride(0),
            value.stride(0),
            query_out.stride(0),
            key_out.stride(0),
            0 if rotation is None else rotation.cos_sin.stride(0),
            self._key_place.address,
            self._key_place.block_stride_bytes,
            self._key_place.head_stride_bytes,
            self._value_place.address,
            self._value_place.block_stride_bytes,
            self._value_place.head_stride_bytes,
            PLAN=plan,
            HIP=torch.version.hip is not None,
            num_warps=tuning.num_warps,
        )


def _check_vectors(**tensors: torch.Tensor) -> None:
    """Refuse rows that vector accesses would miss: the kernel is compiled for aligned ones."""
    for field, tensor in tensors.items():
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
