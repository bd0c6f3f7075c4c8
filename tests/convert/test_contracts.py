"""What a conversion refuses before it touches a byte, and what the cases of this kind demand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvpd import ConversionError, PageFormat
from kvpd.convert import Conversion, Pages, convert_pages
from kvpd.convert.host import HostConversion
from kvpd.convert.reference import ReferenceConversion
from tests.convert.cases import Case, check, pair, set_up
from tests.convert.interpreter import TritonConversion, launch
from tests.convert.slot_writer import write_page

SHAPE: dict[str, Any] = {"heads": 2, "tokens": 16, "head_dim": 64, "dtype": "bfloat16"}
STANDARD = PageFormat.standard(**SHAPE)
SHUFFLED = PageFormat.aiter_shuffle(**SHAPE)
PAGE = STANDARD.page_bytes
ALL = pytest.mark.parametrize("kind", [HostConversion, ReferenceConversion, TritonConversion])


def pages_at(
    memory: torch.Tensor,
    format: PageFormat,
    *,
    offset: int = 0,
    blocks: int = 3,
    stride: int = PAGE,
) -> Pages:
    """One layer of whole pages inside `memory`."""
    return Pages(format, ((memory.as_strided((blocks, PAGE), (stride, 1), offset),),))


def fresh(num_pages: int = 8) -> torch.Tensor:
    return torch.zeros(num_pages * PAGE, dtype=torch.uint8)


def ids(*values: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


@ALL
@pytest.mark.parametrize(
    "source_ids, target_ids, code",
    [
        (ids(0, 1), ids(0), "ids-differ"),
        (ids(0), ids(0, dtype=torch.int64), "ids-differ"),
        (ids(0, dtype=torch.int16), ids(0, dtype=torch.int16), "ids-kind"),
        (ids(0).float(), ids(0).float(), "ids-kind"),
        (ids(0)[None], ids(0)[None], "ids-kind"),
        (ids(0).to("meta"), ids(0), "ids-kind"),
        (ids(0, 9, 1, 9)[::2], ids(0, 1), "ids-stride"),
        (ids(4), ids(0), "id-range"),
        (ids(0), ids(3), "id-range"),
    ],
)
def test_ids(
    kind: type[Conversion], source_ids: torch.Tensor, target_ids: torch.Tensor, code: str
) -> None:
    source = pages_at(fresh(), STANDARD, blocks=4)
    target = pages_at(fresh(), SHUFFLED, blocks=3)
    with pytest.raises(ConversionError) as caught:
        kind(source, target)(source_ids, target_ids)
    assert caught.value.code == code


@ALL
def test_in_place_takes_one_id_tensor(kind: type[Conversion]) -> None:
    target = pages_at(fresh(), SHUFFLED)
    conversion = kind(target.seen_as(STANDARD), target)
    assert conversion.in_place
    with pytest.raises(ConversionError) as caught:
        conversion(ids(0), ids(1))
    assert caught.value.code == "in-place-ids"


@ALL
def test_no_ids_is_no_work(kind: type[Conversion]) -> None:
    memory = fresh()
    kind(pages_at(fresh(), STANDARD), pages_at(memory, SHUFFLED))(ids(), ids())
    assert not memory.any()


@ALL
@pytest.mark.parametrize("offset", [PAGE, PAGE // 2, 16])
def test_partly_shared_memory(kind: type[Conversion], offset: int) -> None:
    """Neither in place nor apart: some page would be overwritten before it is read."""
    memory = fresh()
    with pytest.raises(ConversionError) as caught:
        kind(pages_at(memory, STANDARD), pages_at(memory, SHUFFLED, offset=offset))
    assert caught.value.code == "pages-overlap"


@ALL
def test_target_layers_that_share_bytes(kind: type[Conversion]) -> None:
    memory = fresh()
    one = pages_at(memory, SHUFFLED).layers[0]
    two = pages_at(memory, SHUFFLED, offset=PAGE).layers[0]
    source = Pages(STANDARD, (pages_at(fresh(), STANDARD).layers[0],) * 2)
    with pytest.raises(ConversionError) as caught:
        kind(source, Pages(SHUFFLED, (one, two)))
    assert caught.value.code == "pages-overlap"


@ALL
def test_interleaved_memory_is_not_shared_memory(kind: type[Conversion]) -> None:
    """Slab and cache side by side in every block: ranges meet, bytes do not."""
    memory = fresh()
    source = pages_at(memory, STANDARD, stride=2 * PAGE)
    target = pages_at(memory, SHUFFLED, stride=2 * PAGE, offset=PAGE)
    kind(source, target)(ids(2), ids(0))


@ALL
@pytest.mark.parametrize("field", ["device", "num_layers"])
def test_unlike_sides(kind: type[Conversion], field: str) -> None:
    source = pages_at(fresh(), STANDARD)
    if field == "device":
        source = pages_at(fresh().to("meta"), STANDARD)
    else:
        source = Pages(STANDARD, source.layers * 2)
    with pytest.raises(ConversionError) as caught:
        kind(source, pages_at(fresh(), SHUFFLED))
    assert (caught.value.code, caught.value.field) == ("pages-differ", field)


def pieces_at(format: PageFormat, *lengths: int) -> Pages:
    return Pages(format, (tuple(torch.zeros((2, n), dtype=torch.uint8) for n in lengths),))


@pytest.mark.parametrize(
    "target, code",
    [
        (pages_at(fresh(), SHUFFLED, offset=8), "unaligned"),
        (pages_at(fresh(), SHUFFLED, stride=PAGE + 8), "unaligned"),
        (pieces_at(SHUFFLED, PAGE - 16, 16), "unequal-pieces"),
        (
            Pages(
                SHUFFLED,
                pieces_at(SHUFFLED, PAGE).layers + pieces_at(SHUFFLED, PAGE // 2, PAGE // 2).layers,
            ),
            "unequal-pieces",
        ),
    ],
)
def test_memory_the_kernels_cannot_reach(target: Pages, code: str) -> None:
    """Refused by the kernels; the others convert the same memory."""
    source = Pages(STANDARD, pieces_at(STANDARD, PAGE).layers * target.num_layers)
    with pytest.raises(ConversionError) as caught:
        TritonConversion(source, target)
    assert caught.value.code == code
    for kind in (HostConversion, ReferenceConversion):
        kind(source, target)(ids(0), ids(1))


@ALL
def test_all_groups_converted(kind: type[Conversion]) -> None:
    """Blocks in groups ([1, 2], [9]): 1, 2 and 9 once each, and no other byte."""
    specs = pair(2, 16, 64, "bfloat16", "tiled", reverse=False)
    case = Case(*specs, True, "planes", 0, torch.int32, num_blocks=12)
    setup = set_up(case)
    cache = setup.target
    cache.upload()
    cache.image[:] = cache.memory.numpy()
    rows = torch.cat([ids(1, 2), ids(9)])
    for layer, places in enumerate(cache.places):
        for block in (1, 2, 9):
            raw = torch.cat([piece[block] for piece in cache.pages.layers[layer]])
            rows_of = raw.numpy().view("uint16").reshape(2, 16, 2, 64).transpose(2, 1, 0, 3)
            cache.write(layer, block, write_page(case.target, rows_of[0], rows_of[1]))
        assert len(places) == 2
    before = cache.memory.clone()
    kind(setup.source, cache.pages)(rows, rows)
    assert cache.differing().size == 0 and not torch.equal(before, cache.memory)


@ALL
def test_wrote_into_the_storage_and_not_into_a_temporary(kind: type[Conversion]) -> None:
    """One block; the storage behind a reshaped cache tensor is what changes."""
    storage = torch.arange(2 * PAGE, dtype=torch.int32).to(torch.uint8)
    cache = storage.view(torch.bfloat16).view(2, 2, 16, 2 * 64)  # [B, slots, N, H*D]
    before = storage.clone()
    target = Pages(SHUFFLED, ((cache.view(torch.uint8).view(2, PAGE),),))
    kind(target.seen_as(STANDARD), target)(*[ids(1)] * 2)
    assert torch.equal(storage[:PAGE], before[:PAGE])
    assert not torch.equal(storage[PAGE:], before[PAGE:])


@ALL
@pytest.mark.parametrize("gap_bytes", [0, 2 * 4096])
def test_real_stride_wins(kind: type[Conversion], gap_bytes: int) -> None:
    """H=2 N=16 D=128, planes dense (4096 elements) and with the stride of 8192 elements."""
    specs = pair(2, 16, 128, "bfloat16", "tiled", reverse=False)
    check(Case(*specs, True, "planes", gap_bytes, torch.int32), kind)


def test_conversion_twice_is_not_idempotent() -> None:
    """Why blocks are converted exactly once."""
    torch.manual_seed(1)
    memory = torch.randint(0, 256, (PAGE,), dtype=torch.uint8)
    target = pages_at(memory, SHUFFLED, blocks=1)
    one = ids(0)
    convert_pages(target.seen_as(STANDARD), target, one, one)
    once = memory.clone()
    convert_pages(target.seen_as(STANDARD), target, one, one)
    assert not torch.equal(once, memory)


def test_kernels_refuse_memory_that_is_on_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not interpreted, a kernel would be handed host addresses."""
    import triton

    monkeypatch.setattr(launch, "convert_kernel", object.__new__(triton.JITFunction))
    with pytest.raises(ConversionError) as caught:
        TritonConversion(pages_at(fresh(), STANDARD), pages_at(fresh(), SHUFFLED))
    assert caught.value.code == "no-gpu"
