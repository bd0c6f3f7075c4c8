# mypy: ignore-errors
# The bodies are Triton's language: no types for a Python type checker, capitals for what is known
# at compile time.
"""The Triton kernel: a batch's K and V into their pages, RoPE and QK norm on the way.

A program takes some rows (tokens) of the batch and some heads of Q, of K or of V. Where a page
keeps channels together, a row is stored in 16-byte vectors. Where it keeps tokens together (V of
shuffled pages), so is a group of rows whose slots are one whole vector of tokens: a chunk of a
prompt is made of such groups. The other rows are stored element by element.

Arithmetic is in float32, rounded where the kernels that this one replaces round: once after the
norm, once after the rotation. Products of two 16-bit floats are exact in float32, so whether a
compiler fuses a multiplication with an addition changes no bit of a rotation or of a sum of
squares.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvpd.convert.kernels import read_before_write

VECTOR_BYTES = tl.constexpr(16)


@triton.constexpr_function
def of_plan(plan, name):
    """A field of the plan."""
    return getattr(plan, name)


@triton.constexpr_function
def of_component(plan, index, name):
    """A field of one component's plan: 0 is K, 1 is V."""
    return getattr((plan.key, plan.value)[index], name)


@triton.constexpr_function
def element_type(name):
    """Triton's type of a format's element type."""
    return {
        "bfloat16": tl.bfloat16,
        "float16": tl.float16,
        "float8_e4m3fn": tl.float8e4nv,
        "float8_e4m3fnuz": tl.float8e4b8,
    }[name]


@triton.constexpr_function
def padded(extent):
    """The power of two that a block of this extent needs."""
    return 1 << (extent - 1).bit_length()


@triton.constexpr_function
def ways_of(extent):
    """How often a block of this extent can be halved."""
    return (extent - 1).bit_length()


@triton.jit
def rows_of_heads(
    base, token_stride, rows, heads, START: tl.constexpr, NUM: tl.constexpr, PLAN: tl.constexpr
):
    """Pointers [rows, heads, NUM] to channels from START on of a tensor [tokens, heads, D]."""
    D: tl.constexpr = of_plan(PLAN, "head_dim")
    d = tl.arange(0, NUM)[None, None, :]
    pointers = base + rows[:, None, None] * token_stride + heads[None, :, None] * D + START + d
    if of_plan(PLAN, "has_vectors"):
        # Eight elements: a vector of 16-bit floats, half of one of 8-bit floats. The host has
        # checked addresses and strides.
        B: tl.constexpr = base.dtype.element_ty.primitive_bitwidth
        pointers = tl.max_contiguous(tl.multiple_of(pointers, (1, 1, B)), (1, 1, 8))
    return pointers


@triton.jit
def row_mask(
    rows, num_rows, heads, NUM_HEADS: tl.constexpr, LIMIT: tl.constexpr, NUM: tl.constexpr
):
    """[rows, heads, NUM] which elements there are."""
    mask = (rows[:, None, None] < num_rows) & (heads[None, :, None] < NUM_HEADS)
    if LIMIT != NUM:
        mask = mask & (tl.arange(0, NUM)[None, None, :] < LIMIT)
    return mask


@triton.jit
def quantised(values, scale, NAME: tl.constexpr):
    """values / scale in an 8-bit float, saturating; NaN stays NaN."""
    LIMIT: tl.constexpr = 448.0 if NAME == "float8_e4m3fn" else 240.0
    number = values.to(tl.float32)
    number = tl.div_rn(number, tl.zeros_like(number) + tl.load(scale))
    number = tl.clamp(number, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    return number.to(element_type(NAME))


@triton.jit
def for_cache(values, scale, PLAN: tl.constexpr):
    """Values as the pages keep them."""
    NAME: tl.constexpr = of_plan(PLAN, "cache_dtype")
    if of_plan(PLAN, "dtype") == NAME:
        kept = values.to(element_type(NAME))
    else:
        kept = quantised(values, scale, NAME)
    return kept


@triton.jit
def token_offset(n, PLAN: tl.constexpr, C: tl.constexpr):
    """Bytes from a head's first element to token n."""
    TILE: tl.constexpr = of_component(PLAN, C, "token_tile")
    STEP: tl.constexpr = of_component(PLAN, C, "token_stride_bytes")
    TILE_STEP: tl.constexpr = of_component(PLAN, C, "token_tile_stride_bytes")
    return (n // TILE) * TILE_STEP + (n % TILE) * STEP


@triton.jit
def channel_offset(d, PLAN: tl.constexpr, C: tl.constexpr):
    """Bytes from a head's first element to channel d."""
    TILE: tl.constexpr = of_component(PLAN, C, "channel_tile")
    STEP: tl.constexpr = of_component(PLAN, C, "channel_stride_bytes")
    TILE_STEP: tl.constexpr = of_component(PLAN, C, "channel_tile_stride_bytes")
    return (d // TILE) * TILE_STEP + (d % TILE) * STEP


@triton.jit
def store_rows(
    values, slots, heads, is_kept, base, block_stride, head_stride,
    START: tl.constexpr, NUM: tl.constexpr, LIMIT: tl.constexpr,
    PLAN: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Write [rows, heads, NUM], channels from START on, into the pages of `slots` [rows]."""
    N: tl.constexpr = of_plan(PLAN, "tokens")
    kept: tl.constexpr = element_type(of_plan(PLAN, "cache_dtype"))
    V: tl.constexpr = of_component(PLAN, C, "num_vector")
    place = base + (slots // N) * block_stride + token_offset(slots % N, PLAN, C)
    channels = channel_offset(START + tl.arange(0, NUM), PLAN, C)
    address = place[:, None, None] + heads.to(tl.int64)[None, :, None] * head_stride
    pointers = (address + channels[None, None, :]).to(tl.pointer_type(kept))
    # The cast from an integer forgets what is known of the address.
    if of_component(PLAN, C, "has_channel_vectors") and NUM >= V and START % V == 0:
        pointers = tl.max_contiguous(tl.multiple_of(pointers, (1, 1, VECTOR_BYTES)), (1, 1, V))
    mask = (is_kept & (slots >= 0))[:, None, None]
    mask = mask & (heads[None, :, None] < of_plan(PLAN, "num_kv_heads"))
    if LIMIT != NUM:
        mask = mask & (tl.arange(0, NUM)[None, None, :] < LIMIT)
    tl.store(pointers, values, mask=mask)


@triton.jit
def inverse_rms(pointers, mask, epsilon, PLAN: tl.constexpr):
    """1 / sqrt(mean of squares + epsilon) [rows, heads, 1] of rows of heads.

    The order of the additions is that of vLLM's `rms_norm` on NVIDIA: eight neighbours one after
    the other, then the sums of eights pairwise. Every step adds exactly two numbers, so no
    compiler has a choice.
    """
    D: tl.constexpr = of_plan(PLAN, "head_dim")
    DP: tl.constexpr = padded(D)
    R: tl.constexpr = of_plan(PLAN, "num_rows")
    H: tl.constexpr = of_plan(PLAN, "num_heads")
    numbers = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    squares = tl.reshape(numbers * numbers, (R, H, DP // 8, 2, 2, 2))
    even, odd = tl.split(squares)
    even_0, even_1 = tl.split(even)
    odd_0, odd_1 = tl.split(odd)
    s0, s4 = tl.split(even_0)
    s2, s6 = tl.split(even_1)
    s1, s5 = tl.split(odd_0)
    s3, s7 = tl.split(odd_1)
    total = ((((((s0 + s1) + s2) + s3) + s4) + s5) + s6) + s7
    for way in tl.static_range(ways_of(DP // 8)):
        total = tl.sum(tl.reshape(total, (R, H, DP // 8 >> (way + 1), 2)), axis=3)
    mean = tl.div_rn(total, tl.zeros_like(total) + D)
    return tl.rsqrt(mean + epsilon)


@triton.jit
def normed(
    values, scale, weight,
    START: tl.constexpr, NUM: tl.constexpr, LIMIT: tl.constexpr, IS_ALIGNED: tl.constexpr,
):  # fmt: skip
    """values * scale * weight, rounded once to the type of the values, in float32 again."""
    d = tl.arange(0, NUM)
    pointers = weight + START + d
    if IS_ALIGNED:
        pointers = tl.max_contiguous(tl.multiple_of(pointers, (VECTOR_BYTES,)), (8,))
    factors = tl.load(pointers, mask=d < LIMIT, other=0.0).to(tl.float32)
    product = values.to(tl.float32) * scale * factors[None, None, :]
    return product.to(values.dtype)


@triton.jit
def load_part(
    base, token_stride, rows, num_rows, heads, scale, weight,
    NUM_HEADS: tl.constexpr, START: tl.constexpr, LIMIT: tl.constexpr, PLAN: tl.constexpr,
):  # fmt: skip
    """Channels [START, START + LIMIT) of a program's rows and heads, normed where asked."""
    NUM: tl.constexpr = padded(LIMIT)
    pointers = rows_of_heads(base, token_stride, rows, heads, START, NUM, PLAN)
    mask = row_mask(rows, num_rows, heads, NUM_HEADS, LIMIT, NUM)
    values = tl.load(pointers, mask=mask)
    if of_plan(PLAN, "has_norm"):
        values = normed(values, scale, weight, START, NUM, LIMIT, of_plan(PLAN, "has_vectors"))
    return values


@triton.jit
def cos_and_sin(positions, cos_sin, cos_sin_stride, rows, num_rows, PLAN: tl.constexpr):
    """[rows, 1, half] of each: a row of the table is the cosines, then the sines."""
    HALF: tl.constexpr = of_plan(PLAN, "rotary_dim") // 2
    NUM: tl.constexpr = padded(HALF)
    position = tl.load(positions + rows, mask=rows < num_rows, other=0).to(tl.int64)
    d = tl.arange(0, NUM)
    mask = (rows < num_rows)[:, None] & (d < HALF)[None, :]
    cos_at = cos_sin + position[:, None] * cos_sin_stride + d[None, :]
    sin_at = cos_at + HALF
    if of_plan(PLAN, "has_vectors"):
        cos_at = tl.max_contiguous(tl.multiple_of(cos_at, (1, VECTOR_BYTES)), (1, 8))
        sin_at = tl.max_contiguous(tl.multiple_of(sin_at, (1, VECTOR_BYTES)), (1, 8))
    cos = tl.load(cos_at, mask=mask, other=0.0).to(tl.float32)
    sin = tl.load(sin_at, mask=mask, other=0.0).to(tl.float32)
    return cos[:, None, :], sin[:, None, :]


@triton.jit
def finish_part(
    values, out, out_stride, query_scale, rows, num_rows, heads, slots, is_kept,
    pages, block_stride, head_stride, cache_scale,
    START: tl.constexpr, LIMIT: tl.constexpr, IS_KEY: tl.constexpr, PLAN: tl.constexpr,
):  # fmt: skip
    """Write a part of Q or K back, and K into its pages."""
    NUM: tl.constexpr = padded(LIMIT)
    NUM_HEADS: tl.constexpr = of_plan(PLAN, "num_kv_heads" if IS_KEY else "num_query_heads")
    pointers = rows_of_heads(out, out_stride, rows, heads, START, NUM, PLAN)
    mask = row_mask(rows, num_rows, heads, NUM_HEADS, LIMIT, NUM)
    if IS_KEY:
        tl.store(pointers, values, mask=mask)
        store_rows(
            for_cache(values, cache_scale, PLAN), slots, heads, is_kept,
            pages, block_stride, head_stride, START, NUM, LIMIT, PLAN, 0,
        )  # fmt: skip
    elif of_plan(PLAN, "query_dtype") != of_plan(PLAN, "dtype"):
        # As vLLM's static quantisation: times the scale's reciprocal.
        NAME: tl.constexpr = of_plan(PLAN, "query_dtype")
        LARGEST: tl.constexpr = 448.0 if NAME == "float8_e4m3fn" else 240.0
        one = tl.load(query_scale)
        number = values.to(tl.float32) * tl.div_rn(tl.zeros_like(one) + 1.0, one)
        number = tl.clamp(number, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
        tl.store(pointers, number.to(element_type(NAME)), mask=mask)
    else:
        tl.store(pointers, values, mask=mask)


@triton.jit
def rotate_rows(
    source, source_stride, out, out_stride, positions, cos_sin, cos_sin_stride, weight, epsilon,
    query_scale, rows, num_rows, heads, slots, is_kept,
    pages, block_stride, head_stride, cache_scale,
    IS_KEY: tl.constexpr, PLAN: tl.constexpr, HIP: tl.constexpr,
):  # fmt: skip
    """Q or K: norm, rotation, back into its tensor; K into its pages too."""
    D: tl.constexpr = of_plan(PLAN, "head_dim")
    ROT: tl.constexpr = of_plan(PLAN, "rotary_dim")
    NUM_HEADS: tl.constexpr = of_plan(PLAN, "num_kv_heads" if IS_KEY else "num_query_heads")
    H: tl.constexpr = of_plan(PLAN, "num_heads")
    R: tl.constexpr = of_plan(PLAN, "num_rows")
    scale = epsilon
    if of_plan(PLAN, "has_norm"):
        whole = rows_of_heads(source, source_stride, rows, heads, 0, padded(D), PLAN)
        mask = row_mask(rows, num_rows, heads, NUM_HEADS, D, padded(D))
        scale = inverse_rms(whole, mask, epsilon, PLAN)
    # All loads first: where the result replaces its source, a value must not be read again.
    if of_plan(PLAN, "is_neox"):
        first = load_part(
            source, source_stride, rows, num_rows, heads, scale, weight,
            NUM_HEADS, 0, ROT // 2, PLAN,
        )  # fmt: skip
        second = load_part(
            source, source_stride, rows, num_rows, heads, scale, weight,
            NUM_HEADS, ROT // 2, ROT // 2, PLAN,
        )  # fmt: skip
    else:
        both = load_part(
            source, source_stride, rows, num_rows, heads, scale, weight, NUM_HEADS, 0, ROT, PLAN
        )
        first, second = tl.split(tl.reshape(both, (R, H, padded(ROT) // 2, 2)))
    if ROT < D:
        rest = load_part(
            source, source_stride, rows, num_rows, heads, scale, weight,
            NUM_HEADS, ROT, D - ROT, PLAN,
        )  # fmt: skip
    cos, sin = cos_and_sin(positions, cos_sin, cos_sin_stride, rows, num_rows, PLAN)
    x, y = first.to(tl.float32), second.to(tl.float32)
    rotated_x = (x * cos - y * sin).to(source.dtype.element_ty)
    rotated_y = (y * cos + x * sin).to(source.dtype.element_ty)
    if of_plan(PLAN, "is_in_place"):
        read_before_write(HIP)
    if of_plan(PLAN, "is_neox"):
        finish_part(
            rotated_x, out, out_stride, query_scale, rows, num_rows, heads, slots, is_kept,
            pages, block_stride, head_stride, cache_scale, 0, ROT // 2, IS_KEY, PLAN,
        )  # fmt: skip
        finish_part(
            rotated_y, out, out_stride, query_scale, rows, num_rows, heads, slots, is_kept,
            pages, block_stride, head_stride, cache_scale, ROT // 2, ROT // 2, IS_KEY, PLAN,
        )  # fmt: skip
    else:
        together = tl.reshape(tl.join(rotated_x, rotated_y), (R, H, padded(ROT)))
        finish_part(
            together, out, out_stride, query_scale, rows, num_rows, heads, slots, is_kept,
            pages, block_stride, head_stride, cache_scale, 0, ROT, IS_KEY, PLAN,
        )  # fmt: skip
    if ROT < D:
        finish_part(
            rest, out, out_stride, query_scale, rows, num_rows, heads, slots, is_kept,
            pages, block_stride, head_stride, cache_scale, ROT, D - ROT, IS_KEY, PLAN,
        )  # fmt: skip


@triton.jit
def copy_rows(
    source, source_stride, rows, num_rows, heads, slots, is_kept,
    pages, block_stride, head_stride, cache_scale, PLAN: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """K or V into its pages as it is, row by row."""
    D: tl.constexpr = of_plan(PLAN, "head_dim")
    NUM: tl.constexpr = padded(D)
    pointers = rows_of_heads(source, source_stride, rows, heads, 0, NUM, PLAN)
    mask = row_mask(rows, num_rows, heads, of_plan(PLAN, "num_kv_heads"), D, NUM)
    values = for_cache(tl.load(pointers, mask=mask), cache_scale, PLAN)
    store_rows(values, slots, heads, is_kept, pages, block_stride, head_stride, 0, NUM, D, PLAN, C)


@triton.jit
def is_in_group(slots, rows, own, num_slots, GROUP: tl.constexpr):
    """[rows] whether a row's slot lies in a vector of tokens whose every slot is in the batch, in
    order and side by side; `own` are the slots of the rows."""
    start = rows - own % GROUP
    step = tl.arange(0, GROUP)[None, :]
    neighbour = start[:, None] + step
    there = (own >= 0)[:, None] & (neighbour >= 0) & (neighbour < num_slots)
    found = tl.load(slots + neighbour, mask=there, other=-1).to(tl.int64)
    same = found == (own - own % GROUP)[:, None] + step
    return tl.min((same & there).to(tl.int32), axis=1) > 0


@triton.jit
def load_group(
    source, source_stride, start, num_slots, heads, cache_scale,
    PLAN: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Elements [heads and channels, tokens] of a vector of tokens from row `start` on."""
    D: tl.constexpr = of_plan(PLAN, "head_dim")
    H: tl.constexpr = of_plan(PLAN, "num_heads")
    NUM: tl.constexpr = padded(D)
    V: tl.constexpr = of_component(PLAN, C, "num_vector")
    rows = start.to(tl.int64) + tl.arange(0, V)
    pointers = rows_of_heads(source, source_stride, rows, heads, 0, NUM, PLAN)
    mask = row_mask(rows, num_slots, heads, of_plan(PLAN, "num_kv_heads"), D, NUM)
    values = for_cache(tl.load(pointers, mask=mask), cache_scale, PLAN)
    return tl.reshape(tl.permute(values, (1, 2, 0)), (H * NUM, V))


@triton.jit
def store_group(
    values, slot, heads, pages, block_stride, head_stride, PLAN: tl.constexpr, C: tl.constexpr
):
    """Write what `load_group` returned from slot `slot` on, in 16-byte stores."""
    D: tl.constexpr = of_plan(PLAN, "head_dim")
    N: tl.constexpr = of_plan(PLAN, "tokens")
    H: tl.constexpr = of_plan(PLAN, "num_heads")
    NUM: tl.constexpr = padded(D)
    V: tl.constexpr = of_component(PLAN, C, "num_vector")
    kept: tl.constexpr = element_type(of_plan(PLAN, "cache_dtype"))
    which = tl.arange(0, H * NUM)
    head, d = tl.min(heads, axis=0) + which // NUM, which % NUM
    place = pages + (slot // N) * block_stride + token_offset(slot % N, PLAN, C)
    address = place + head.to(tl.int64) * head_stride + channel_offset(d, PLAN, C)
    pointers = address[:, None].to(tl.pointer_type(kept)) + tl.arange(0, V)[None, :]
    pointers = tl.max_contiguous(tl.multiple_of(pointers, (1, VECTOR_BYTES)), (1, V))
    mask = (head < of_plan(PLAN, "num_kv_heads")) & (d < D)
    tl.store(pointers, values, mask=mask[:, None])


@triton.jit
def copy_groups(
    source, source_stride, all_slots, num_slots, first_row, heads,
    pages, block_stride, head_stride, cache_scale, PLAN: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """K or V whose pages keep tokens together: whole vectors of tokens, then the rows left over.

    A vector belongs to the program that has its first row, though it may end in the next one's.
    """
    V: tl.constexpr = of_component(PLAN, C, "num_vector")
    R: tl.constexpr = of_plan(PLAN, "num_rows")
    for part in tl.static_range(R // V):
        rows = first_row + part * V + tl.arange(0, V)
        own = tl.load(all_slots + rows, mask=rows < num_slots, other=-1).to(tl.int64)
        grouped = is_in_group(all_slots, rows, own, num_slots, V)
        # Two vectors are at least a vector of rows apart, so at most one starts here.
        start = tl.max(tl.where(grouped & (own % V == 0), rows, -1), axis=0)
        if start >= 0:
            slot = tl.sum(tl.where(rows == start, own, 0), axis=0)
            values = load_group(
                source, source_stride, start, num_slots, heads, cache_scale, PLAN, C
            )
            store_group(values, slot, heads, pages, block_stride, head_stride, PLAN, C)
        left = (own >= 0) & (grouped == 0)
        if tl.max(left.to(tl.int32), axis=0) > 0:
            copy_rows(
                source, source_stride, rows, num_slots, heads, own, left,
                pages, block_stride, head_stride, cache_scale, PLAN, C,
            )  # fmt: skip


@triton.jit
def copy_component(
    source, source_stride, all_slots, num_slots, first_row, rows, slots, is_kept, heads,
    pages, block_stride, head_stride, cache_scale, PLAN: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """K or V into its pages as it is."""
    if of_component(PLAN, C, "has_groups"):
        copy_groups(
            source, source_stride, all_slots, num_slots, first_row, heads,
            pages, block_stride, head_stride, cache_scale, PLAN, C,
        )  # fmt: skip
    else:
        copy_rows(
            source, source_stride, rows, num_slots, heads, slots, is_kept,
            pages, block_stride, head_stride, cache_scale, PLAN, C,
        )  # fmt: skip


# No number or address may decide what is compiled: the first batch of an unseen size would compile
# inside the step.
@triton.jit(
    do_not_specialize=[
        "num_rows", "num_slots", "query_stride", "key_stride", "value_stride", "query_out_stride",
        "key_out_stride", "cos_sin_stride", "key_pages", "key_block_stride", "key_head_stride",
        "value_pages", "value_block_stride", "value_head_stride", "epsilon",
    ],
    do_not_specialize_on_alignment=[
        "query", "key", "value", "query_out", "key_out", "positions", "cos_sin", "slots",
        "query_weight", "key_weight", "query_scale", "key_scale", "value_scale",
    ],
)  # fmt: skip
def write_kernel(
    query,  # [num_rows, query heads, D], rows dense
    key,  # [num_rows, KV heads, D]
    value,  # [num_rows, KV heads, D]
    query_out,  # as query; may be the same memory
    key_out,  # as key; may be the same memory
    positions,  # int64 [num_rows]
    cos_sin,  # [positions, rotary dim]
    slots,  # [num_slots], block * tokens + token; negative: padding
    query_weight,  # [D]
    key_weight,  # [D]
    query_scale,  # float32 [1]
    key_scale,  # float32 [1]
    value_scale,  # float32 [1]
    epsilon: tl.float32,
    num_rows: tl.int32,
    num_slots: tl.int32,  # rows past it are rotated and not stored
    query_stride: tl.int64,  # elements from token to token
    key_stride: tl.int64,
    value_stride: tl.int64,
    query_out_stride: tl.int64,
    key_out_stride: tl.int64,
    cos_sin_stride: tl.int64,
    key_pages: tl.int64,  # address of K's first element of block 0
    key_block_stride: tl.int64,  # bytes
    key_head_stride: tl.int64,  # bytes
    value_pages: tl.int64,
    value_block_stride: tl.int64,
    value_head_stride: tl.int64,
    PLAN: tl.constexpr,
    HIP: tl.constexpr,
):
    """Programs: blocks of rows by groups of heads, those of Q, then of K, then of V."""
    R: tl.constexpr = of_plan(PLAN, "num_rows")
    H: tl.constexpr = of_plan(PLAN, "num_heads")
    QUERY_GROUPS: tl.constexpr = of_plan(PLAN, "num_query_groups")
    KEY_GROUPS: tl.constexpr = of_plan(PLAN, "num_kv_groups")
    first_row = tl.program_id(0) * R
    group = tl.program_id(1)
    rows = first_row.to(tl.int64) + tl.arange(0, R)
    is_kept = rows < num_slots
    if group < QUERY_GROUPS:
        heads = group * H + tl.arange(0, H)
        none = rows * 0 - 1
        rotate_rows(
            query, query_stride, query_out, query_out_stride, positions, cos_sin, cos_sin_stride,
            query_weight, epsilon, query_scale, rows, num_rows, heads, none, is_kept,
            key_pages, key_block_stride, key_head_stride, key_scale, False, PLAN, HIP,
        )  # fmt: skip
    elif group < QUERY_GROUPS + KEY_GROUPS:
        heads = (group - QUERY_GROUPS) * H + tl.arange(0, H)
        own = tl.load(slots + rows, mask=is_kept, other=-1).to(tl.int64)
        if of_plan(PLAN, "has_rotation"):
            rotate_rows(
                key, key_stride, key_out, key_out_stride, positions, cos_sin, cos_sin_stride,
                key_weight, epsilon, query_scale, rows, num_rows, heads, own, is_kept,
                key_pages, key_block_stride, key_head_stride, key_scale, True, PLAN, HIP,
            )  # fmt: skip
        else:
            copy_component(
                key, key_stride, slots, num_slots, first_row, rows, own, is_kept, heads,
                key_pages, key_block_stride, key_head_stride, key_scale, PLAN, 0,
            )  # fmt: skip
    else:
        heads = (group - QUERY_GROUPS - KEY_GROUPS) * H + tl.arange(0, H)
        own = tl.load(slots + rows, mask=is_kept, other=-1).to(tl.int64)
        copy_component(
            value, value_stride, slots, num_slots, first_row, rows, own, is_kept, heads,
            value_pages, value_block_stride, value_head_stride, value_scale, PLAN, 1,
        )  # fmt: skip
