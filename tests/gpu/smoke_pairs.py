"""The smoke's pairs in real vLLM: python -m tests.gpu.smoke_pairs --json FILE --logs DIR

Two prefills (TRITON_ATTN, FLASH_ATTN) and five decoders, all started at once; arms.py says which
of them are joined. A decoder answers to each prefill's prompts of its own, so none is a hit.

Expected tokens are one engine's that prefills and decodes by itself, which the prefills do too. A
decoder that computes with Triton's kernels on FLASH_ATTN's pages is compared with TRITON_ATTN
decoding from those very pages: copied into its cache, not transferred.
"""

from __future__ import annotations

from tests.gpu.arms import SMOKE_ARMS, Backend, Side
from tests.gpu.measure import compared_prompts, tokens_alone, tokens_from_pages_of
from tests.gpu.smoke_part import Joined, Run, main
from tests.vllm.client import EngineProcess

FIRST_SEEDS: dict[Backend, int] = {"standard": 0, "flash": 500}


def run(part: Run) -> None:
    """Start all engines, then check pair by pair."""
    bed = part.bed
    started: list[tuple[str, Side, EngineProcess]] = []

    def engine(role: str, side: Side, name: str) -> EngineProcess:
        for known_role, known, process in started:
            if (known_role, known) == (role, side):
                return process
        options = bed.prefill(side) if role == "prefill" else bed.decode(side)
        process = part.start(f"{role} {name}".replace(", ", "-").replace(" ", "-"), options)
        started.append((role, side, process))
        return process

    pairs = {
        name: Joined(engine("prefill", arm.prefill, name), engine("decode", arm.decode, name))
        for name, arm in SMOKE_ARMS.items()
    }
    for _, side, process in started:
        part.expect(process, side.backend)
    prefills = {side.backend: process for role, side, process in started if role == "prefill"}
    batches = {name: compared_prompts(bed.scale, seed) for name, seed in FIRST_SEEDS.items()}
    alone = {name: tokens_alone(prefills[name], batch) for name, batch in batches.items()}
    mixed = tokens_from_pages_of(
        prefills["flash"], prefills["standard"], batches["flash"], part.directory
    )
    for name, arm in SMOKE_ARMS.items():
        made_by, computed_by = arm.prefill.backend, arm.decode.backend
        is_mixed = made_by == "flash" and computed_by != "flash"
        expected = mixed if is_mixed else alone[made_by]
        part.try_arm(name, arm, pairs[name], expected, FIRST_SEEDS[made_by])


if __name__ == "__main__":
    main(run)
