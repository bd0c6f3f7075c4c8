"""What a writer is, and the contracts every implementation checks before it runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from kvpd.convert import Pages
from kvpd.convert.axes import VECTOR_BYTES
from kvpd.errors import WriteError
from kvpd.write.plan import EIGHT_BIT_FLOATS, Work, check_work, key_and_value

_SLOT_DTYPES = (torch.int32, torch.int64)
# Calls that were checked: what each of them does.
_known: dict[tuple[object, ...], Work] = {}
_MAX_KNOWN = 4096


@dataclass(frozen=True)
class Rotation:
    """RoPE: channels in pairs, turned by an angle that depends on the position.

    Attributes:
        positions: int64 [rows].
        cos_sin: [positions, rotary dim] in the type of Q and K, the cosines first; its width says
            how many channels are rotated, the first of each head. Positions beyond it are not
            looked for.
        is_neox: channel i turns with channel i + rotary_dim / 2; otherwise with its neighbour.
    """

    positions: torch.Tensor
    cos_sin: torch.Tensor
    is_neox: bool


@dataclass(frozen=True)
class Norm:
    """RMS norm of each head of Q and K, before the rotation; weights are [D]."""

    query_weight: torch.Tensor
    key_weight: torch.Tensor
    epsilon: float


@dataclass(frozen=True)
class Scales:
    """Per-tensor scales, float32 of one element: what is kept is the value divided by the scale."""

    key: torch.Tensor
    value: torch.Tensor
    query: torch.Tensor | None = None


@dataclass(frozen=True)
class Batch:
    """One call, its defaults filled in."""

    key: torch.Tensor
    value: torch.Tensor
    slots: torch.Tensor
    query: torch.Tensor | None
    rotation: Rotation | None
    norm: Norm | None
    query_out: torch.Tensor | None
    key_out: torch.Tensor | None
    scales: Scales | None


class Writer(ABC):
    """Tokens of a batch become bytes of one layer's pages.

    A row of `slots` says where the row of `key` and `value` goes: block * tokens of a page + token.
    Negative slots are padding. Rows past the last slot are rotated and stored nowhere, as vLLM pads
    a batch. A call enqueues one kernel on the current stream, allocates nothing, does not
    synchronise, and may be captured in a CUDA graph.

    Slots and positions on a GPU are taken as they are: nobody can look at them without waiting.
    """

    def __init__(self, pages: Pages, layer: int) -> None:
        """Raises `WriteError` where there is no such layer, or pages hold more than K and V."""
        if not 0 <= layer < pages.num_layers:
            raise WriteError(
                f"layer {layer} of {pages.num_layers}",
                code="no-layer",
                field="layer",
                got=layer,
                expected=f"< {pages.num_layers}",
            )
        self.pages = pages
        self.layer = layer
        self._component, _ = key_and_value(pages.format)

    def __call__(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        slots: torch.Tensor,
        *,
        query: torch.Tensor | None = None,
        rotation: Rotation | None = None,
        norm: Norm | None = None,
        query_out: torch.Tensor | None = None,
        key_out: torch.Tensor | None = None,
        scales: Scales | None = None,
    ) -> None:
        """Write; tensors are [rows, heads, D] with dense heads and any distance between rows.

        Args:
            key, value: of all KV heads, in one 16-bit float type.
            slots: int32 or int64 [slots], at most as many as rows.
            query: rotated with K where given; needs `rotation`.
            rotation: RoPE of Q and K. None leaves them as they are.
            norm: RMS norm of Q and K before the rotation.
            query_out, key_out: where rotated Q and K go; None puts them in the place of their
                source. Q may go to an 8-bit float, divided by `scales.query`.
            scales: for pages of 8-bit floats, and for such a `query_out`.

        Raises:
            WriteError: a tensor breaks this contract.
        """
        batch = Batch(key, value, slots, query, rotation, norm, query_out, key_out, scales)
        # The checks take longer than a launch: once for all layers that are called alike.
        kind = (type(self), self.pages.format, self.pages.device, _kind(batch))
        work = _known.get(kind)
        if work is None:
            work = self._checked(batch)
            if len(_known) >= _MAX_KNOWN:
                _known.clear()
            _known[kind] = work
        if key.shape[0]:
            self._run(batch, work)

    @abstractmethod
    def _run(self, batch: Batch, work: Work) -> None:
        """Write; the batch is checked and not empty."""

    def _checked(self, batch: Batch) -> Work:
        rows, dtype = batch.key.shape[0], batch.key.dtype
        heads = self._component.heads
        self._check_rows("key", batch.key, rows, heads, dtype)
        self._check_rows("value", batch.value, rows, heads, dtype)
        slots = batch.slots
        if slots.dim() != 1 or slots.dtype not in _SLOT_DTYPES or slots.numel() > rows:
            raise _wrong("slots", slots, f"int32 or int64 [<= {rows}]")
        if slots.numel() > 1 and slots.stride(0) != 1:
            raise _wrong("slots", slots, "stride 1")
        if batch.rotation is None:
            for field in ("query", "norm", "query_out", "key_out"):
                if getattr(batch, field) is not None:
                    raise WriteError(
                        f"{field} was given without a rotation",
                        code="no-rotation",
                        field=field,
                        got="given",
                        expected="rotation, or nothing",
                    )
            work = Work(0, _name(dtype))
        else:
            work = self._checked_rotation(batch, batch.rotation, rows)
        check_work(self.pages.format, work)
        quantises = self._component.dtype in EIGHT_BIT_FLOATS
        scales = batch.scales
        for field, needed in (
            ("key", quantises),
            ("value", quantises),
            ("query", work.query_dtype in EIGHT_BIT_FLOATS),
        ):
            scale = getattr(scales, field) if scales is not None else None
            if needed and (scale is None or scale.dtype != torch.float32 or scale.numel() != 1):
                raise _wrong(f"scales.{field}", scale, "float32, one element")
        given = [tensor for tensor in _all_tensors(batch) if tensor is not None]
        devices = {tensor.device for tensor in given} | {self.pages.device}
        if len(devices) > 1:
            raise WriteError(
                f"tensors and pages are on {', '.join(sorted(map(str, devices)))}",
                code="devices-differ",
                field="device",
                got=", ".join(sorted(map(str, devices))),
                expected=str(self.pages.device),
            )
        return work

    def _checked_rotation(self, batch: Batch, rotation: Rotation, rows: int) -> Work:
        dtype = batch.key.dtype
        positions, table = rotation.positions, rotation.cos_sin
        if positions.dtype != torch.int64 or positions.shape != (rows,) or not _dense(positions):
            raise _wrong("rotation.positions", positions, f"int64 [{rows}]")
        if table.dim() != 2 or table.dtype != dtype or not _dense(table):
            raise _wrong("rotation.cos_sin", table, f"{dtype} [positions, rotary dim]")
        heads = 0
        if batch.query is not None:
            heads = batch.query.shape[1] if batch.query.dim() == 3 else -1
            self._check_rows("query", batch.query, rows, heads, dtype)
        if batch.norm is not None:
            for field in ("query_weight", "key_weight"):
                weight = getattr(batch.norm, field)
                wanted = (self._component.channels,)
                if weight.shape != wanted or weight.dtype != dtype or not _dense(weight):
                    raise _wrong(f"norm.{field}", weight, f"{dtype} {list(wanted)}")
        query_dtype = ""
        if batch.query_out is not None:
            if batch.query is None:
                raise _wrong("query", None, "what query_out is made of")
            query_dtype = _name(batch.query_out.dtype)
            self._check_rows("query_out", batch.query_out, rows, heads, batch.query_out.dtype)
        if batch.key_out is not None:
            self._check_rows("key_out", batch.key_out, rows, self._component.heads, dtype)
        in_place = batch.key_out is None or (batch.query is not None and batch.query_out is None)
        return Work(
            num_query_heads=heads,
            dtype=_name(dtype),
            rotary_dim=table.shape[1],
            is_neox=rotation.is_neox,
            has_norm=batch.norm is not None,
            is_in_place=in_place or _share(batch),
            query_dtype=query_dtype,
        )

    def _check_rows(
        self, field: str, tensor: torch.Tensor, rows: int, heads: int, dtype: torch.dtype
    ) -> None:
        dim = self._component.channels
        if tensor.shape != (rows, heads, dim) or tensor.dtype != dtype or heads < 1:
            raise _wrong(field, tensor, f"{dtype} [{rows}, {max(heads, 1)}, {dim}]")
        # A kernel steps through a row by element and head; another view would be misread.
        if tensor.stride(2) != 1 or (heads > 1 and tensor.stride(1) != dim):
            raise _wrong(field, tensor, f"strides [any, {dim}, 1]")


def _kind(batch: Batch) -> tuple[object, ...]:
    """Everything that the checks look at."""
    traits = [
        None
        if tensor is None
        else (
            tensor.shape,
            tensor.stride(),
            tensor.dtype,
            tensor.get_device(),
            tensor.data_ptr() % VECTOR_BYTES,
        )
        for tensor in _all_tensors(batch)
    ]
    is_neox = None if batch.rotation is None else batch.rotation.is_neox
    return (*traits, is_neox, batch.norm is None, _share(batch))


def _share(batch: Batch) -> bool:
    """Whether something is written to where something is read from."""
    pairs = ((batch.query, batch.query_out), (batch.key, batch.key_out))
    return any(a is not None and b is not None and a.data_ptr() == b.data_ptr() for a, b in pairs)


def _all_tensors(batch: Batch) -> tuple[torch.Tensor | None, ...]:
    """In a fixed order, None for each that was not given."""
    rotation, norm, scales = batch.rotation, batch.norm, batch.scales
    return (
        batch.key,
        batch.value,
        batch.slots,
        batch.query,
        batch.query_out,
        batch.key_out,
        None if rotation is None else rotation.positions,
        None if rotation is None else rotation.cos_sin,
        None if norm is None else norm.query_weight,
        None if norm is None else norm.key_weight,
        None if scales is None else scales.key,
        None if scales is None else scales.value,
        None if scales is None else scales.query,
    )


def _dense(tensor: torch.Tensor) -> bool:
    return tensor.stride(-1) == 1 or tensor.shape[-1] == 1


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _wrong(field: str, tensor: torch.Tensor | None, expected: str) -> WriteError:
    got = "None"
    if tensor is not None:
        got = f"{_name(tensor.dtype)} {list(tensor.shape)} with strides {list(tensor.stride())}"
    return WriteError(
        f"{field} is {got}, expected {expected}",
        code="write-tensor",
        field=field,
        got=got,
        expected=expected,
    )
