"""Whether the conversion kernels take a pair of formats, without a GPU."""

from __future__ import annotations

from dataclasses import dataclass

from kvpd._kvpd import EngineDescription, Verdict
from kvpd.errors import ConversionError, MissingDependencyError

Problem = tuple[str, str, str, str, str]
"""Code, field, the decoder's value, the prefill's value, what to make of it."""


@dataclass(frozen=True)
class KernelProblems:
    """Why a conversion cannot run, and why that could not be told."""

    reasons: tuple[Problem, ...] = ()
    doubts: tuple[Problem, ...] = ()


def kernel_problems(verdict: Verdict, decode: EngineDescription) -> KernelProblems:
    """Plan the kernels that a decoder would compile for an accepted pair.

    Pages in host memory are converted by the core, which takes every pair.
    """
    source, target = verdict.source, verdict.target
    on_gpu = any(region.memory == "vram" for region in decode.regions)
    if source is None or target is None or not on_gpu:
        return KernelProblems()
    try:
        from kvpd.convert.plan import IN_PLACE, OUT_OF_PLACE, plan_kernel
    except MissingDependencyError as error:
        problem = ("kernel-unknown", "page_format", target.name, source.name, str(error))
        return KernelProblems(doubts=(problem,))
    try:
        for tuning in (IN_PLACE, OUT_OF_PLACE):
            plan_kernel(source, target, tuning)
    except ConversionError as error:
        problem = (error.code, error.field, target.name, source.name, str(error))
        return KernelProblems(reasons=(problem,))
    return KernelProblems()
