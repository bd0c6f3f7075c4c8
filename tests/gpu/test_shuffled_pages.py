"""The test decoder's own kernels, in Triton's interpreter on a CPU, against the element oracle."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
import torch

from tests.convert.interpreter import interpreting
from tests.vllm.oracle import PageShape

POISON = 0x5A
BLOCKS = 7
GUARD_BYTES = 4096


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    with interpreting():
        from tests.gpu import shuffled_pages
    return shuffled_pages


def shuffled_cache(shape: PageShape, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Poisoned memory, and the cache [B, 2, N, H*D] inside it as vLLM lays it out."""
    slot = shape.heads * shape.head_dim
    sizes = (BLOCKS, 2, shape.tokens, slot)
    count = BLOCKS * 2 * shape.tokens * slot
    memory = torch.full((2 * count + 2 * GUARD_BYTES,), POISON, dtype=torch.uint8)
    elements = memory[GUARD_BYTES:-GUARD_BYTES].view(torch.bfloat16)
    if layout == "LHBNC":
        return memory, elements.view(2, BLOCKS, shape.tokens, slot).transpose(0, 1)
    return memory, elements.view(sizes)


def pages_of(cache: torch.Tensor) -> np.ndarray:
    """The bytes of every block, K plane then V plane: [B, page bytes]."""
    return cache.contiguous().reshape(BLOCKS, -1).view(torch.uint8).numpy()


@pytest.mark.parametrize("layout", ["LBHNC", "LHBNC"])
@pytest.mark.parametrize("shape", [(2, 16, 64), (3, 32, 128)], ids=str)
def test_tokens_are_written_where_the_oracle_says(
    kernels: ModuleType, shape: tuple[int, int, int], layout: str
) -> None:
    page = PageShape(*shape, "bfloat16")
    memory, cache = shuffled_cache(page, layout)
    rng = np.random.default_rng(4)
    slots = rng.permutation(BLOCKS * page.tokens)[: 3 * page.tokens].astype(np.int64)
    slots[5] = -1
    # As in a model: K and V of a token are views into one row.
    both = torch.from_numpy(rng.integers(0, 1 << 15, (len(slots), 2, page.heads, page.head_dim)))
    both = both.to(torch.int16).view(torch.bfloat16)
    kernels.write_tokens(both[:, 0], both[:, 1], cache, torch.from_numpy(slots))
    packed = np.full((BLOCKS, page.heads, page.tokens, 2 * page.head_dim), 0x5A5A, dtype=np.int16)
    for row, slot in enumerate(slots):
        if slot >= 0:
            tokens = both[row].view(torch.int16).numpy()
            packed[slot // page.tokens, :, slot % page.tokens] = np.concatenate(tokens, axis=-1)
    expected = page.shuffle(packed.reshape(BLOCKS, -1).view(np.uint8))
    assert np.array_equal(pages_of(cache), expected)
    assert (memory[:GUARD_BYTES] == POISON).all()
    assert (memory[-GUARD_BYTES:] == POISON).all()


@pytest.mark.parametrize("layout", ["LBHNC", "LHBNC"])
@pytest.mark.parametrize("shape", [(2, 16, 64), (3, 32, 128)], ids=str)
def test_exactly_the_pages_in_use_are_unshuffled(
    kernels: ModuleType, shape: tuple[int, int, int], layout: str
) -> None:
    """Two requests share a page, one ends inside a page, one row is padding."""
    page = PageShape(*shape, "bfloat16")
    _, cache = shuffled_cache(page, layout)
    rng = np.random.default_rng(5)
    page_bytes = pages_of(cache).shape[1]
    original = rng.integers(0, 256, (BLOCKS, page_bytes), dtype=np.uint8)
    raw = torch.from_numpy(page.shuffle(original)).view(torch.bfloat16)
    cache.copy_(raw.view(BLOCKS, 2, page.tokens, -1))
    tokens = page.tokens
    table = torch.tensor([[4, 2, 5], [4, 6, 1], [3, 3, 3]], dtype=torch.int32)
    seq_lens = torch.tensor([3 * tokens, tokens + 1, 0], dtype=torch.int32)
    packed = torch.full((BLOCKS, page_bytes), POISON, dtype=torch.uint8)
    target = packed.view(torch.bfloat16).view(BLOCKS, page.heads, tokens, 2 * page.head_dim)
    kernels.unshuffle(cache, table, seq_lens, target)
    used = [2, 4, 5, 6]
    unused = [0, 1, 3]
    assert np.array_equal(packed.numpy()[used], original[used])
    assert (packed.numpy()[unused] == POISON).all()


def test_planes_that_are_not_dense_are_refused(kernels: ModuleType) -> None:
    """Token-major memory: the tile's addresses would fall into other tokens."""
    cache = torch.zeros((4, 16, 2, 128), dtype=torch.bfloat16).transpose(1, 2)
    slots = torch.zeros(1, dtype=torch.int64)
    key = torch.zeros((1, 2, 64), dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="strides"):
        kernels.write_tokens(key, key, cache, slots)
