"""A decoder on a GPU that is nearly full: python -m tests.gpu.smoke_full --json FILE --logs DIR

vLLM sizes the decoder's cache by `gpu_memory_utilization`, and captures its graphs, in the memory
that a ballast leaves: once so little that the default slab is smaller than usual, once so little
that there is none. The engine has to come up, say so, and serve right.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from tests.gpu.arms import DEFAULT, KVPD, Arm
from tests.gpu.bed import Bed
from tests.gpu.measure import compared_prompts, tokens_alone
from tests.gpu.smoke_part import Joined, Run, main
from tests.vllm.client import EngineOptions

GIBIBYTE = 1 << 30
# What vLLM may take: weights, activations, graphs, and the rest for its cache.
REQUESTED_BYTES = 8 * GIBIBYTE
USUAL_SLAB_BYTES = GIBIBYTE // 2


@dataclass(frozen=True)
class Tight:
    """A nearly full GPU.

    Attributes:
        left_bytes: what vLLM may not take of the memory it finds free.
        has_slab: whether a slab fits.
        said: begins what the engine says of it.
    """

    left_bytes: int
    has_slab: bool
    said: str

    @property
    def arm(self) -> Arm:
        """What has to come of it."""
        return Arm(KVPD, DEFAULT, placement="staged" if self.has_slab else "in_place")

    def faults(self, memory: dict[str, Any], log: str) -> list[str]:
        """In words, everything that is not as it has to be, served tokens and pages apart."""
        found, slab_bytes = [], memory["slab_bytes"]
        low, high = (1, USUAL_SLAB_BYTES - 1) if self.has_slab else (0, 0)
        if not low <= slab_bytes <= high:
            found.append(f"a slab of {slab_bytes} bytes, not {low} to {high}")
        num_said = log.count(self.said)
        if num_said != 1:
            found.append(f"it says {num_said} times, not once: {self.said}")
        if "Graph capturing finished" not in log:
            found.append("no graph was captured")
        return found


TIGHT = {
    "a smaller slab": Tight(5 * GIBIBYTE + GIBIBYTE // 4, True, "the slab has "),
    "no slab": Tight(2 * GIBIBYTE, False, "no slab, raw pages land in the cache"),
}


def run(part: Run) -> None:
    """One prefill, and one decoder after the other: each sizes its cache by what is free."""
    bed = part.bed
    prefill = part.start("prefill", bed.prefill(KVPD))
    part.expect(prefill, KVPD.backend)
    expected = tokens_alone(prefill, compared_prompts(bed.scale))
    for name, tight in TIGHT.items():
        ballast = fill(REQUESTED_BYTES + tight.left_bytes) if bed.num_gpus else None
        options = sized_by_vllm(bed) if bed.num_gpus else bed.decode(DEFAULT)
        decode = part.start(f"decode-{name}".replace(" ", "-"), options)
        part.expect(decode, DEFAULT.backend)
        memory = decode.call("memory")
        found = part.try_arm(name, tight.arm, Joined(prefill, decode), expected)
        found["memory_after_start"], found["memory_at_the_end"] = memory, decode.call("memory")
        if bed.num_gpus:
            log = decode.log
            found["slab_said"] = [line for line in log.splitlines() if tight.said in line]
            part.result["faults"] += [f"{name}: {fault}" for fault in tight.faults(memory, log)]
        part.write()
        decode.close()
        del ballast


def fill(left_bytes: int) -> torch.Tensor:
    """Take all of the GPU's free memory but so much."""
    torch.cuda.empty_cache()
    free_bytes, _ = torch.cuda.mem_get_info()
    return torch.empty(free_bytes - left_bytes, dtype=torch.uint8, device="cuda")


def sized_by_vllm(bed: Bed) -> EngineOptions:
    """A decoder as operators start one: memory by utilization, graphs of all sizes."""
    options = bed.decode(DEFAULT)
    total_bytes = torch.cuda.get_device_properties(0).total_memory
    sized = {
        "gpu_memory_utilization": REQUESTED_BYTES / total_bytes,
        "kv_cache_memory_bytes": None,
        "num_gpu_blocks_override": None,
        "max_num_seqs": 256,
        "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
    }
    return replace(options, llm_args=options.llm_args | sized)


if __name__ == "__main__":
    main(run)
