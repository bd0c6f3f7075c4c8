"""What is said about an arm, on results that are written down."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.arms import ARMS
from tests.gpu.bed import FULL, Bed
from tests.gpu.verdict import arm_faults, read_protocols

BED = Bed(2, FULL, Path())
CONVERTING = ARMS["kvpd, in place"]
DEFECT = ARMS["stock, standard to shuffled"]
READ_BY_CUDA_IPC = """\
[1.5] [host:643 :0]   +--------+-------------+------------------------------------------------+
[1.5] [host:643 :0]   | b0d112c8-eccb-45e3-bb10-ff743c3 intra-node cfg#2                      |
[1.5] [host:643 :0]   | remote memory read by ucp_get*(multi) into cuda/GPU0 from cuda/dev[1] |
[1.5] [host:643 :0]   +--------+-------------+------------------------------------------------+
[1.5] [host:643 :0]   | Range  | Description |                     Config                     |
[1.5] [host:643 :0]   +--------+-------------+------------------------------------------------+
[1.5] [host:643 :0]   | 0..inf | zero-copy   | cuda_ipc/cuda                                  |
[1.5] [host:643 :0]   +--------+-------------+------------------------------------------------+
"""
SENT_BY_TCP = """\
[1.6] [host:643 :0]   +------------+--------------------+--------------------+
[1.6] [host:643 :0]   | b0d112c8-eccb-45e3-bb10-ff743c3 intra-node cfg#2     |
[1.6] [host:643 :0]   | active message by ucp_am_send*(egr) from host memory |
[1.6] [host:643 :0]   +------------+--------------------+--------------------+
[1.6] [host:643 :0]   | 16516..inf | multi-frag copy-in | tcp/lo             |
[1.6] [host:643 :0]   +------------+--------------------+--------------------+
"""


def answer(hit_blocks: int = 0) -> dict[str, Any]:
    return {"right_tokens": True, "pages": 72, "right_pages": 72, "hit_blocks": hit_blocks}


def faultless() -> dict[str, Any]:
    return {
        "checked": {
            "one_by_one": [answer(), answer(FULL.shared_blocks)],
            "together": [answer()],
        },
        "said": [],
        "read_protocols": ["0..inf zero-copy cuda_ipc/cuda"],
        "measured": [
            {"main_stream_submits": 0, "hand_overs": [{"ready": {"placement": "in_place"}}]}
        ],
    }


def wrong_tokens(found: dict[str, Any]) -> None:
    found["checked"]["one_by_one"][0]["right_tokens"] = False


def wrong_page(found: dict[str, Any]) -> None:
    found["checked"]["together"][0]["right_pages"] = 71


def nothing_received(found: dict[str, Any]) -> None:
    found["checked"]["one_by_one"][0] |= {"pages": 0, "right_pages": 0}


def no_hits(found: dict[str, Any]) -> None:
    found["checked"]["one_by_one"][-1]["hit_blocks"] = 0


def other_protocol(found: dict[str, Any]) -> None:
    found["read_protocols"] = ["0..inf multi-frag copy-in tcp/lo"]


def other_placement(found: dict[str, Any]) -> None:
    found["measured"][0]["hand_overs"].append({"ready": {"placement": "staged"}})


def stock_instead(found: dict[str, Any]) -> None:
    found["measured"][0]["hand_overs"].append({"ready": None})


def no_protocol(found: dict[str, Any]) -> None:
    found["read_protocols"] = []


def test_nothing_is_said_about_a_right_arm() -> None:
    assert arm_faults(CONVERTING, faultless(), BED) == []


@pytest.mark.parametrize(
    "spoil",
    [
        wrong_tokens,
        wrong_page,
        nothing_received,
        no_hits,
        other_protocol,
        no_protocol,
        other_placement,
        stock_instead,
    ],
)
def test_each_fault_is_one(spoil: Any) -> None:
    found = faultless()
    spoil(found)
    assert len(arm_faults(CONVERTING, found, BED)) == 1


def test_an_arm_that_did_not_run_is_a_fault() -> None:
    assert arm_faults(CONVERTING, {"error": "it ended\n--- log ---"}, BED) == ["it ended"]


def test_the_defect_has_to_be_there_and_silent() -> None:
    found = faultless()
    del found["measured"]
    for request in found["checked"]["one_by_one"]:
        request["right_tokens"] = False
    assert arm_faults(DEFECT, found, BED) == []
    loud, right = deepcopy(found), deepcopy(found)
    loud["said"] = ["NIXL transfer failure"]
    right["checked"]["one_by_one"][1]["right_tokens"] = True
    assert len(arm_faults(DEFECT, loud, BED)) == len(arm_faults(DEFECT, right, BED)) == 1


def test_the_main_stream_switch_has_to_have_been_used() -> None:
    arm = ARMS["kvpd, in place, main stream"]
    found = faultless()
    assert len(arm_faults(arm, found, BED)) == 1
    found["measured"][-1]["main_stream_submits"] = 40
    assert arm_faults(arm, found, BED) == []


def test_ucx_tables_are_read() -> None:
    log = SENT_BY_TCP + READ_BY_CUDA_IPC + SENT_BY_TCP
    assert read_protocols(log) == ["0..inf zero-copy cuda_ipc/cuda"]
    through_tcp = log.replace("cuda_ipc/cuda", "tcp/lo       ")
    assert read_protocols(through_tcp) == ["0..inf zero-copy tcp/lo"]
