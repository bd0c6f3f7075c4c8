"""From formats and tuning to one compiled kernel: its compile-time constants and its warps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvpd.convert.plan import KernelPlan, Tuning, plan_kernel
from kvpd.errors import ConversionError

if TYPE_CHECKING:
    from kvpd._kvpd import PageFormat

# More would leave a thread under 64 registers on NVIDIA; on AMD it is the workgroup's limit.
_MAX_WARPS = 16


@dataclass(frozen=True)
class Specialisation:
    """What `convert_kernel` is compiled with.

    Attributes:
        plan: the index arithmetic.
        constants: the kernel's constexpr arguments by name.
        num_warps: warps per program.
        num_parts: parts of a page, each with its own program.
    """

    plan: KernelPlan
    constants: dict[str, Any]
    num_warps: int
    num_parts: int


def specialise(
    source: PageFormat,
    target: PageFormat,
    tuning: Tuning,
    *,
    in_place: bool,
    source_piece_bytes: int,
    target_piece_bytes: int,
    hip: bool,
    is_parallel: bool = True,
) -> Specialisation:
    """Choose the kernel for pages that both sides hold in pieces of the given length.

    Args:
        is_parallel: programs run at the same time, so that they can meet; False for the
            interpreter, which runs one after another and holds any page in one.

    Raises:
        ConversionError: different components, offsets that 16-byte vectors cannot reach, or a
            bounded number of programs for parts that have to meet.
    """
    plan = plan_kernel(source, target, tuning)
    num_parts = _num_parts(plan, tuning) if is_parallel or not in_place else 1
    if in_place and num_parts > 1 and tuning.num_programs is not None:
        raise ConversionError(
            f"{tuning.num_programs} programs share pages of {num_parts} parts that have to meet",
            code="bounded-programs",
            field="num_programs",
            got=tuning.num_programs,
            expected="None in place, where a page has several parts",
        )
    part_tiles = plan.num_tiles // num_parts
    constants = {
        "PLAN": plan,
        "SOURCE_PIECES": source.page_bytes // source_piece_bytes,
        "SOURCE_PIECE_BYTES": source_piece_bytes,
        "TARGET_PIECES": target.page_bytes // target_piece_bytes,
        "TARGET_PIECE_BYTES": target_piece_bytes,
        "IN_PLACE": in_place,
        "PART_TILES": part_tiles,
        "PARTS": num_parts,
        "RESIDENT": tuning.num_programs is not None,
        "HIP": hip,
    }
    num_warps = _num_warps(plan, tuning, plan.tile_bytes * part_tiles, 64 if hip else 32)
    return Specialisation(plan, constants, num_warps, num_parts)


def _num_parts(plan: KernelPlan, tuning: Tuning) -> int:
    """The fewest parts of whole tiles, equally many each, that fit a program's registers."""
    divisors = [count for count in range(1, plan.num_tiles + 1) if plan.num_tiles % count == 0]
    page_bytes = plan.num_tiles * plan.tile_bytes
    fitting = [count for count in divisors if page_bytes // count <= tuning.part_bytes]
    return fitting[0] if fitting else plan.num_tiles


def _num_warps(plan: KernelPlan, tuning: Tuning, in_flight_bytes: int, warp_threads: int) -> int:
    if tuning.num_warps is not None:
        return tuning.num_warps
    warps = in_flight_bytes // (tuning.thread_bytes * warp_threads)
    # With more threads than vectors in a component, several threads would move the same vector.
    vectors = min(component.num_vectors for component in plan.components)
    warps = max(1, min(warps, vectors // warp_threads, _MAX_WARPS))
    return 1 << (warps.bit_length() - 1)
