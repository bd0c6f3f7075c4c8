# mypy: ignore-errors
# The bodies are Triton's language: no types for a Python type checker, capitals for what is known
# at compile time.
"""The Triton kernel: every page of every layer in one launch, driven by a `KernelPlan`.

A program moves one part of a page: a few tiles, a tile being a few whole heads of every component.
Out of place the parts of a page are independent. In place a page is read before any of it is
written: a program loads its part into registers and passes a barrier before it stores; where a page
has several parts, their programs also meet at a counter between the two.

Why programs may wait for each other here: each takes its part by a ticket from one atomic counter,
a page's parts being neighbours, so the tickets taken are always a prefix of all of them. Only the
newest page can have parts that nobody has taken; at most all but one of its programs wait for
those, every other program finishes, and its place goes to the next ticket. In whatever order
programs are dispatched, the launch ends if `PARTS` of them can be resident at once, which the host
has checked.
"""

from __future__ import annotations

import triton
import triton.language as tl

VECTOR_BYTES = tl.constexpr(16)


@triton.constexpr_function
def of_component(plan, index, name):
    """A field of one component's plan."""
    return getattr(plan.components[index], name)


@triton.constexpr_function
def of_walk(plan, index, walk, name):
    """A field of one component's load or store walk."""
    return getattr(getattr(plan.components[index], walk), name)


@triton.constexpr_function
def num_components(plan):
    """Components of a page."""
    return len(plan.components)


@triton.jit
def read_before_write(HIP: tl.constexpr):
    """No store of this program before every load of this program has returned."""
    if HIP:
        # s_barrier alone does not wait for loads in flight; the clobber keeps the compiler from
        # moving a load or a store across.
        tl.inline_asm_elementwise(
            "s_waitcnt vmcnt(0)\n\ts_barrier\n\tv_mov_b32 $0, $1",
            "=v,v,~{memory}",
            [tl.program_id(0)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        # Warps are not ordered otherwise: one would store where another has yet to load.
        tl.debug_barrier()


@triton.jit
def vector_offsets(
    start, PLAN: tl.constexpr, C: tl.constexpr, WALK: tl.constexpr, NUM: tl.constexpr
):
    """Page offsets [NUM] of a tile's vectors in bytes, and which of them are no padding [NUM]."""
    EXTENTS: tl.constexpr = of_walk(PLAN, C, WALK, "extents")
    LIMITS: tl.constexpr = of_walk(PLAN, C, WALK, "limits")
    STRIDES: tl.constexpr = of_walk(PLAN, C, WALK, "strides_bytes")
    rest = tl.arange(0, NUM)
    offset = tl.full((NUM,), 0, tl.int32) + start
    inside = rest >= 0
    for axis in tl.static_range(len(EXTENTS)):
        coordinate = rest % EXTENTS[axis]
        rest = rest // EXTENTS[axis]
        offset += coordinate * STRIDES[axis]
        if LIMITS[axis] != EXTENTS[axis]:
            inside = inside & (coordinate < LIMITS[axis])
    return offset, inside


@triton.jit
def piece_bases(table, layer, page, PIECES: tl.constexpr):
    """Addresses of a page's first piece and, of two pieces, its second."""
    entry = table + layer * (PIECES * 2)
    first = tl.load(entry) + page * tl.load(entry + 1)
    second = first
    if PIECES == 2:
        second = tl.load(entry + 2) + page * tl.load(entry + 3)
    return first, second


@triton.jit
def addresses(
    table,  # int64 [num_layers, PIECES, 2]: address, block stride in bytes
    layer,
    page,
    first,
    second,
    offset,  # int32 [vectors]
    inside,  # int1 [vectors]
    PIECES: tl.constexpr,
    PIECE_BYTES: tl.constexpr,
):
    """int64 [vectors]: where page bytes `offset` lie."""
    if PIECES == 1:
        address = first + offset.to(tl.int64)
    elif PIECES == 2:
        base = tl.where(offset < PIECE_BYTES, first, second - PIECE_BYTES)
        address = base + offset.to(tl.int64)
    else:
        piece = offset // PIECE_BYTES
        entry = table + (layer * PIECES + piece) * 2
        base = tl.load(entry, mask=inside, other=0)
        base += page * tl.load(entry + 1, mask=inside, other=0)
        address = base + (offset - piece * PIECE_BYTES).to(tl.int64)
    return address


@triton.jit
def vector_pointers(address, UNIT: tl.constexpr):
    """Pointers [vectors, units of a vector] from the vectors' addresses."""
    UNITS: tl.constexpr = VECTOR_BYTES // UNIT
    if UNIT == 1:
        base = address[:, None].to(tl.pointer_type(tl.int8))
    elif UNIT == 2:
        base = address[:, None].to(tl.pointer_type(tl.int16))
    else:
        base = address[:, None].to(tl.pointer_type(tl.int32))
    pointers = base + tl.arange(0, UNITS)[None, :]
    # The cast from an integer forgets what is known of the address. Without these two hints every
    # access is one unit wide. The host has checked that they hold.
    return tl.max_contiguous(tl.multiple_of(pointers, (UNIT, VECTOR_BYTES)), (1, UNITS))


@triton.jit
def load_tile(
    table, layer, page, first, second, tile,
    PLAN: tl.constexpr, C: tl.constexpr, PIECES: tl.constexpr, PIECE_BYTES: tl.constexpr,
):  # fmt: skip
    """Units [vectors, units of a vector] of component C of a tile, as the load walk goes."""
    UNIT: tl.constexpr = of_component(PLAN, C, "unit_bytes")
    NUM: tl.constexpr = of_component(PLAN, C, "num_vectors")
    START: tl.constexpr = of_component(PLAN, C, "source_start_bytes")
    STEP: tl.constexpr = of_component(PLAN, C, "source_step_bytes")
    offset, inside = vector_offsets(START + tile * STEP, PLAN, C, "load", NUM)
    address = addresses(table, layer, page, first, second, offset, inside, PIECES, PIECE_BYTES)
    pointers = vector_pointers(address, UNIT)
    if of_component(PLAN, C, "is_padded"):
        values = tl.load(pointers, mask=inside[:, None])
    else:
        values = tl.load(pointers)
    return values


@triton.jit
def store_tile(
    table, layer, page, first, second, tile, values,
    PLAN: tl.constexpr, C: tl.constexpr, PIECES: tl.constexpr, PIECE_BYTES: tl.constexpr,
):  # fmt: skip
    """Permute what `load_tile` returned and write it."""
    UNIT: tl.constexpr = of_component(PLAN, C, "unit_bytes")
    NUM: tl.constexpr = of_component(PLAN, C, "num_vectors")
    S: tl.constexpr = of_component(PLAN, C, "shape")
    P: tl.constexpr = of_component(PLAN, C, "order")
    if len(P) > 0:
        # Only here: threads exchange values, and a load issued after an exchange waits for it.
        values = tl.reshape(values, (S[0], S[1], S[2], S[3], S[4], S[5], S[6]))
        values = tl.permute(values, (P[0], P[1], P[2], P[3], P[4], P[5], P[6]))
        values = tl.reshape(values, (NUM, VECTOR_BYTES // UNIT))
    START: tl.constexpr = of_component(PLAN, C, "target_start_bytes")
    STEP: tl.constexpr = of_component(PLAN, C, "target_step_bytes")
    offset, inside = vector_offsets(START + tile * STEP, PLAN, C, "store", NUM)
    address = addresses(table, layer, page, first, second, offset, inside, PIECES, PIECE_BYTES)
    pointers = vector_pointers(address, UNIT)
    if of_component(PLAN, C, "is_padded"):
        tl.store(pointers, values, mask=inside[:, None])
    else:
        tl.store(pointers, values)


@triton.jit
def meet(counter, PARTS: tl.constexpr):
    """Return when all programs of a page have arrived; the last to leave resets the counter."""
    # Release: the loads before it, of all threads behind the barrier, are done for everybody who
    # acquires the full count.
    arrived = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") + 1
    while arrived < PARTS:
        arrived = tl.atomic_add(counter, 0, sem="acq_rel", scope="gpu")
    left = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") + 1
    if left == 2 * PARTS:
        tl.atomic_xchg(counter, 0, sem="acq_rel", scope="gpu")


@triton.jit
def convert_part(
    source_table, target_table, layer, source_page, target_page, part, counter,
    PLAN: tl.constexpr, SOURCE_PIECES: tl.constexpr, SOURCE_PIECE_BYTES: tl.constexpr,
    TARGET_PIECES: tl.constexpr, TARGET_PIECE_BYTES: tl.constexpr,
    IN_PLACE: tl.constexpr, PART_TILES: tl.constexpr, PARTS: tl.constexpr, HIP: tl.constexpr,
):  # fmt: skip
    """One part of a page: all loads, in place the barrier (and the other parts), all stores."""
    COMPONENTS: tl.constexpr = num_components(PLAN)
    source_first, source_second = piece_bases(source_table, layer, source_page, SOURCE_PIECES)
    target_first, target_second = piece_bases(target_table, layer, target_page, TARGET_PIECES)
    held = ()
    # All loads first, out of place too: more of them are in flight than if each waited for stores.
    for tile in tl.static_range(PART_TILES):
        for c in tl.static_range(COMPONENTS):
            values = load_tile(
                source_table, layer, source_page, source_first, source_second,
                part * PART_TILES + tile, PLAN, c, SOURCE_PIECES, SOURCE_PIECE_BYTES,
            )  # fmt: skip
            held = held + (values,)  # noqa: RUF005 - Triton has no unpacking
    if IN_PLACE:
        read_before_write(HIP)
        if PARTS > 1:
            meet(counter, PARTS)
    for tile in tl.static_range(PART_TILES):
        for c in tl.static_range(COMPONENTS):
            store_tile(
                target_table, layer, target_page, target_first, target_second,
                part * PART_TILES + tile, held[tile * COMPONENTS + c],
                PLAN, c, TARGET_PIECES, TARGET_PIECE_BYTES,
            )  # fmt: skip


@triton.jit
def convert_work(
    source_table, target_table, source_ids, target_ids, counters, num_ids, work,
    PLAN: tl.constexpr, SOURCE_PIECES: tl.constexpr, SOURCE_PIECE_BYTES: tl.constexpr,
    TARGET_PIECES: tl.constexpr, TARGET_PIECE_BYTES: tl.constexpr,
    IN_PLACE: tl.constexpr, PART_TILES: tl.constexpr, PARTS: tl.constexpr, HIP: tl.constexpr,
):  # fmt: skip
    """Work item `work`: a part of a page of a layer; the parts of a page are neighbours."""
    page = work // PARTS
    layer = page // num_ids
    index = page % num_ids
    source_page = tl.load(source_ids + index).to(tl.int64)
    target_page = tl.load(target_ids + index).to(tl.int64)
    if (source_page >= 0) & (target_page >= 0):
        convert_part(
            source_table, target_table, layer, source_page, target_page, work % PARTS,
            counters + 1 + page, PLAN, SOURCE_PIECES, SOURCE_PIECE_BYTES, TARGET_PIECES,
            TARGET_PIECE_BYTES, IN_PLACE, PART_TILES, PARTS, HIP,
        )  # fmt: skip


@triton.jit
def next_ticket(counters, num_work):
    """The next work item that no program has; whoever takes the last one resets the counter."""
    ticket = tl.atomic_add(counters, 1, sem="acq_rel", scope="gpu")
    if ticket == num_work - 1:
        tl.atomic_xchg(counters, 0, sem="acq_rel", scope="gpu")
    return ticket


# Neither the number of ids nor where they lie may decide what is compiled: the first request of an
# unseen count would compile inside the step.
@triton.jit(
    do_not_specialize=["num_ids", "num_work"],
    do_not_specialize_on_alignment=["source_ids", "target_ids"],
)
def convert_kernel(
    source_table,  # int64 [num_layers, SOURCE_PIECES, 2]: address, block stride in bytes
    target_table,  # int64 [num_layers, TARGET_PIECES, 2]
    source_ids,  # int32 or int64 [num_ids], negative: padding; may be pinned host memory
    target_ids,  # as source_ids
    counters,  # int32 [1 + num_layers * num_ids], all 0: tickets, then arrivals of each page
    num_ids,
    num_work,  # num_layers * num_ids * PARTS
    PLAN: tl.constexpr,
    SOURCE_PIECES: tl.constexpr,
    SOURCE_PIECE_BYTES: tl.constexpr,
    TARGET_PIECES: tl.constexpr,
    TARGET_PIECE_BYTES: tl.constexpr,
    IN_PLACE: tl.constexpr,
    PART_TILES: tl.constexpr,
    PARTS: tl.constexpr,
    RESIDENT: tl.constexpr,
    HIP: tl.constexpr,
):
    """A program per work item, or (RESIDENT) programs that share all work items."""
    work = tl.program_id(0)
    if IN_PLACE and PARTS > 1:
        work = next_ticket(counters, num_work)
    if RESIDENT:
        for work in range(tl.program_id(0), num_work, tl.num_programs(0)):
            convert_work(
                source_table, target_table, source_ids, target_ids, counters, num_ids, work,
                PLAN, SOURCE_PIECES, SOURCE_PIECE_BYTES, TARGET_PIECES, TARGET_PIECE_BYTES,
                IN_PLACE, PART_TILES, PARTS, HIP,
            )  # fmt: skip
    else:
        convert_work(
            source_table, target_table, source_ids, target_ids, counters, num_ids, work,
            PLAN, SOURCE_PIECES, SOURCE_PIECE_BYTES, TARGET_PIECES, TARGET_PIECE_BYTES,
            IN_PLACE, PART_TILES, PARTS, HIP,
        )  # fmt: skip
