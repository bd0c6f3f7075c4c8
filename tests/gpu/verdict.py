"""What an arm has to show."""

from __future__ import annotations

from typing import Any

from tests.gpu.arms import Arm
from tests.gpu.bed import Bed


def arm_faults(arm: Arm, found: dict[str, Any], bed: Bed) -> list[str]:
    """In words, everything about an arm that is not as it has to be."""
    if "error" in found:
        return [found["error"].splitlines()[0]]
    faults = []
    one_by_one, together = found["checked"]["one_by_one"], found["checked"]["together"]
    right = sum(answer["right_tokens"] for answer in one_by_one)
    if arm.is_right and right != len(one_by_one):
        faults.append(f"tokens of {len(one_by_one) - right} of {len(one_by_one)} are wrong")
    if not arm.is_right and right:
        faults.append(f"tokens of {right} are right: the defect is not there")
    if not arm.is_right and found["said"]:
        faults.append(f"it was not silent: {found['said'][0]}")
    answers = one_by_one + together
    wrong_pages = sum(answer["pages"] - answer["right_pages"] for answer in answers)
    if wrong_pages or not all(answer["pages"] for answer in answers):
        faults.append(f"{wrong_pages} pages are wrong")
    if one_by_one[-1]["hit_blocks"] != bed.scale.shared_blocks:
        faults.append(f"{one_by_one[-1]['hit_blocks']} blocks were hits, not the shared ones")
    protocols = found["read_protocols"]
    reads = arm.placement != "direct"
    if bed.num_gpus and reads and not (protocols and all("cuda_ipc" in p for p in protocols)):
        faults.append(f"UCX does not read through cuda_ipc: {protocols}")
    if not arm.is_right:
        return faults
    passes = found["measured"]
    ready = [row["ready"] for each in passes for row in each["hand_overs"]]
    placements = {None if answer is None else answer["placement"] for answer in ready}
    # Direct needs CUDA: on a CPU the pair falls back by itself.
    if placements != {arm.placement} and bed.num_gpus:
        faults.append(f"pages came {placements}, not {arm.placement}")
    # On a CPU there is one stream.
    if arm.on_main_stream and bed.num_gpus and not passes[-1]["main_stream_submits"]:
        faults.append("no conversion ran on the main stream")
    return faults


def read_protocols(log: str) -> list[str]:
    """How UCX reads a peer's GPU memory: rows of the tables that UCX_PROTO_INFO prints.

    Only the rows of the longest messages: those of pages.
    """
    rows: list[str] = []
    in_table = False
    for line in log.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if any("remote memory" in cell or "cfg#" in cell for cell in cells):
            title = " ".join(cells)
            in_table = "remote memory read" in title and "cuda" in title
        elif in_table and len(cells) == 3 and cells[0].endswith("..inf"):
            rows.append(" ".join(cells))
    return rows
