"""``kvpd demo``: it passes when all is right, and its checks fail when a byte is not."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("nixl")

import kvpd.cli
from kvpd.cli.demo import oracle
from kvpd.cli.demo.decode import DecodeCache, run_demo
from kvpd.cli.demo.report import as_json, as_text
from kvpd.cli.demo.result import REFUSALS, DemoResult, PlacementResult, Refusal
from kvpd.cli.demo.scenario import DECODE_POISON, PREFILL_POISON, Scenario
from kvpd.errors import FormatError
from kvpd.request import Failed

SMALL = Scenario(layers=2, heads=2, tokens=16, head_dim=16, blocks=6, requests=3)
SMALL_SHAPE = {"layers": 2, "heads": 2, "tokens": 16, "head-dim": 16, "blocks": 6, "requests": 3}
SMALL_FLAGS = [word for name, n in SMALL_SHAPE.items() for word in (f"--{name}", str(n))]


def test_the_demo_passes_and_prints_what_it_promises() -> None:
    command = [sys.executable, "-m", "kvpd.cli", "demo", *SMALL_FLAGS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert "\x1b" not in done.stdout, "colour codes outside a terminal"
    for text in (
        "standard(H=2, N=16, D=16, bfloat16",
        "aiter-shuffle(H=2, N=16, D=16, bfloat16",
        "convert: ",
        "placement in_place",
        "placement staged",
        "descriptors: planned  merged  by NIXL",
        "READ ms",
        "conversion ms",
        "GB/s",
        "3 release notices for 3 requests, pages unchanged",
        "0 differ",
        *(f"  {name}: refused" for name in REFUSALS),
    ):
        assert text in done.stdout
    assert done.stdout.splitlines()[-1] == "PASS"


def main_here(*flags: str) -> int:
    """The same command in this process: torch is loaded once. The prefill is a process anyway."""
    return kvpd.cli.main(["demo", *SMALL_FLAGS, *flags])


@pytest.mark.parametrize(
    "flags",
    [
        ["--dtype", "float16", "--tokens", "32", "--heads", "1", "--placement", "staged"],
        ["--heads", "3", "--head-dim", "64", "--placement", "in_place", "--seed", "5"],
        ["--blocks", "1", "--requests", "1", "--layers", "1"],
    ],
)
def test_other_shapes_as_json(flags: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    status = main_here(*flags, "--json")
    out, err = capfd.readouterr()
    assert status == 0, out + err
    result = json.loads(out)
    assert result["holds"] is True
    for placement in result["placements"]:
        assert placement["bytes_wrong"] == 0 and placement["bytes_compared"] > 0
        assert placement["prefill_unchanged"] is True
        assert placement["verdict"] == "convert"
        for request in placement["requests"]:
            assert request["ready"] is True
            assert request["descriptors_counted"] == request["descriptors_merged"]
    assert {refusal["name"] for refusal in result["refusals"]} == set(REFUSALS)


def test_a_pair_out_of_scope_is_refused_with_its_reason(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert main_here("--dtype", "float32") == 1
    assert "element-type-out-of-scope" in capfd.readouterr().err


@pytest.mark.parametrize(
    "flags", [["--head-dim", "12"], ["--layers", "0"], ["--blocks", "2", "--requests", "3"]]
)
def test_a_shape_that_cannot_be_is_an_error_not_a_traceback(
    flags: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert main_here(*flags) == 2
    out, err = capfd.readouterr()
    assert out == "" and err.startswith("kvpd: error: ")


# The oracle against a writer that goes element by element


def slot_by_slot(scenario: Scenario, request_id: str, layer: int) -> dict[str, Any]:
    """Pages written one element at a time from the formulas of the two formats."""
    heads, tokens, channels = scenario.heads, scenario.tokens, scenario.head_dim
    x = 16 // scenario.element_bytes
    token_ids = scenario.token_ids(request_id)
    k, v = oracle.key_values(scenario, token_ids, layer)
    num_pages = -(-len(token_ids) // tokens)
    plane = heads * tokens * channels
    poison = int.from_bytes(bytes([PREFILL_POISON]) * k.itemsize, "little")
    standard = np.full((num_pages, 2 * plane), poison, dtype=k.dtype)
    k_plane, v_plane = (np.full((num_pages, plane), poison, dtype=k.dtype) for _ in range(2))
    for position in range(len(token_ids)):
        page, n = divmod(position, tokens)
        for h in range(heads):
            for d in range(channels):
                key, value = k[position, h, d], v[position, h, d]
                row = (h * tokens + n) * 2 * channels
                standard[page, row + d] = key
                standard[page, row + channels + d] = value
                k_plane[page, h * channels * tokens + d // x * tokens * x + n * x + d % x] = key
                v_plane[page, h * channels * tokens + n // x * channels * x + d * x + n % x] = value
    return {"standard": standard, "k": k_plane, "v": v_plane}


@pytest.mark.parametrize(
    "scenario",
    [
        SMALL,
        Scenario(layers=2, heads=3, tokens=32, head_dim=16, dtype="float8_e4m3fn", blocks=4),
        Scenario(layers=1, heads=1, tokens=16, head_dim=8, dtype="float32", blocks=2, requests=1),
    ],
    ids=lambda scenario: scenario.dtype,
)
def test_the_oracle_equals_a_slot_by_slot_writer(scenario: Scenario) -> None:
    for request_id in scenario.request_ids():
        for layer in range(scenario.layers):
            expected = slot_by_slot(scenario, request_id, layer)
            k, v = oracle.pages(scenario, scenario.token_ids(request_id), layer)
            k_plane, v_plane = oracle.shuffled_planes(k, v)
            assert (oracle.standard_pages(k, v) == expected["standard"].view(np.uint8)).all()
            assert (k_plane == expected["k"].view(np.uint8)).all()
            assert (v_plane == expected["v"].view(np.uint8)).all()


@pytest.mark.parametrize(
    ("heads", "channels", "place", "standard", "shuffled"),
    [
        (2, 16, (1, 5, 9), (681, 697), (425, 333)),
        (8, 128, (7, 5, 9), (29961, 30089), (14505, 14413)),
    ],
)
def test_the_oracle_has_the_golden_offsets(
    heads: int,
    channels: int,
    place: tuple[int, int, int],
    standard: tuple[int, int],
    shuffled: tuple[int, int],
) -> None:
    h, t, d = place
    k = np.zeros((1, 16, heads, channels), dtype=np.uint16)
    v = np.zeros_like(k)
    k[0, t, h, d], v[0, t, h, d] = 1, 2
    pages = oracle.standard_pages(k, v).view(np.uint16)[0]
    assert (pages[standard[0]], pages[standard[1]]) == (1, 2)
    planes = [plane.view(np.uint16)[0] for plane in oracle.shuffled_planes(k, v)]
    assert (planes[0][shuffled[0]], planes[1][shuffled[1]]) == (1, 2)


def test_contents_differ_in_every_direction() -> None:
    """A page in another's place would be seen: no two of them are alike."""
    seen = set()
    for request_id in SMALL.request_ids():
        for layer in range(SMALL.layers):
            k, v = oracle.pages(SMALL, SMALL.token_ids(request_id), layer)
            for page in (*k, *v):
                seen.add(page.tobytes())
                heads = {page[:, h].tobytes() for h in range(SMALL.heads)}
                assert len(heads) == SMALL.heads
    pages = sum(len(ids) for ids in SMALL.decode_ids().values())
    assert len(seen) == 2 * pages * SMALL.layers


def test_ids_are_random_distinct_and_leave_blocks_unused() -> None:
    scenario = Scenario()
    for ids, num_blocks in (
        (scenario.decode_ids(), scenario.decode_blocks),
        (scenario.prefill_ids(), scenario.prefill_blocks),
    ):
        flat = [block for part in ids.values() for block in part]
        assert len(set(flat)) == len(flat) == scenario.blocks < num_blocks
        assert max(flat) < num_blocks
        assert sum(b == a + 1 for a, b in itertools.pairwise(flat)) < len(flat) // 4
    assert scenario.decode_ids() != replace(scenario, seed=1).decode_ids()


def test_a_scenario_is_the_same_in_another_process() -> None:
    code = (
        "from kvpd.cli.demo.scenario import Scenario; s = Scenario(seed=3); "
        "print(s.prefill_ids(), s.token_ids('request-001').tolist())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    scenario = Scenario(seed=3)
    tokens = scenario.token_ids("request-001").tolist()
    assert done.stdout.strip() == f"{scenario.prefill_ids()} {tokens}"


# The check itself


def right_memory() -> np.ndarray[Any, np.dtype[np.uint8]]:
    pieces = [piece for _, piece in oracle.expected_decode_memory(SMALL, SMALL.decode_ids())]
    return np.concatenate(pieces)


def byte_of(layer: int, plane: int, block: int, offset: int) -> int:
    where = oracle.DecodeMap(SMALL)
    return where.start(layer, plane) + block * where.plane_bytes + offset


def places() -> dict[str, tuple[int, str]]:
    used = SMALL.decode_ids()["request-001"][0]
    everyone = {block for ids in SMALL.decode_ids().values() for block in ids}
    unused = next(block for block in range(SMALL.decode_blocks) if block not in everyone)
    where = oracle.DecodeMap(SMALL)
    return {
        "page, first byte": (byte_of(1, 0, used, 0), f"layer 1, K plane, block {used}, byte 0"),
        "page, last byte": (
            byte_of(0, 1, used, where.plane_bytes - 1),
            f"layer 0, V plane, block {used}, byte {where.plane_bytes - 1}",
        ),
        "unused block": (byte_of(1, 1, unused, 7), f"layer 1, V plane, block {unused}, byte 7"),
        "first guard": (0, "guard"),
        "guard between planes": (where.start(0, 1) - 1, "guard"),
        "last guard": (where.num_bytes - 1, "guard"),
    }


@pytest.mark.parametrize("place", places())
@pytest.mark.parametrize("bit", [0, 7])
def test_one_wrong_bit_anywhere_is_found_and_named(place: str, bit: int) -> None:
    memory = right_memory()
    assert oracle.compare(memory, SMALL, SMALL.decode_ids()).holds
    at, words = places()[place]
    memory[at] ^= 1 << bit
    comparison = oracle.compare(memory, SMALL, SMALL.decode_ids())
    assert not comparison.holds and comparison.num_wrong == 1
    assert comparison.num_bytes == memory.size
    assert words in comparison.first_wrong and f"byte {at}" in comparison.first_wrong


def test_raw_pages_and_swapped_pages_do_not_pass() -> None:
    where, ids = oracle.DecodeMap(SMALL), SMALL.decode_ids()["request-000"]
    raw = right_memory()
    for layer in range(SMALL.layers):
        pages = oracle.standard_pages(
            *oracle.pages(SMALL, SMALL.token_ids("request-000"), layer)
        ).reshape(len(ids), 2, -1)
        for page, block in zip(pages, ids, strict=True):
            for plane in range(2):
                at = byte_of(layer, plane, block, 0)
                raw[at : at + where.plane_bytes] = page[plane]
    assert not oracle.compare(raw, SMALL, SMALL.decode_ids()).holds
    swapped = right_memory()
    first, second = (
        slice(byte_of(0, 0, block, 0), byte_of(0, 0, block, where.plane_bytes)) for block in ids
    )
    swapped[first], swapped[second] = swapped[second].copy(), swapped[first].copy()
    assert not oracle.compare(swapped, SMALL, SMALL.decode_ids()).holds


def test_an_untouched_cache_is_poison_everywhere() -> None:
    cache = DecodeCache(SMALL)
    assert (cache.tensor.numpy() == DECODE_POISON).all()
    assert oracle.compare(cache.tensor.numpy(), SMALL, {}).holds
    assert not oracle.compare(cache.tensor.numpy(), SMALL, SMALL.decode_ids()).holds


@pytest.fixture(scope="module")
def result() -> DemoResult:
    return run_demo(SMALL, ("staged",), timeout_seconds=60, advance=lambda: None)


def test_the_result_holds_only_if_every_part_does(result: DemoResult) -> None:
    assert result.holds
    (placement,), refusals = result.placements, result.refusals

    def with_placement(**changes: Any) -> DemoResult:
        return replace(result, placements=(replace(placement, **changes),))

    def with_refusal(**changes: Any) -> DemoResult:
        return replace(result, refusals=(replace(refusals[0], **changes), *refusals[1:]))

    wrong = replace(placement.comparison, num_wrong=1, first_wrong="byte 7")
    failed = Failed("request-000", "aborted", "", (1,))
    for broken in (
        with_placement(comparison=wrong),
        with_placement(prefill_unchanged=False),
        with_placement(notices=placement.notices[1:]),
        with_placement(notices=(*placement.notices, placement.notices[0])),
        with_placement(outcomes=placement.outcomes[1:]),
        with_placement(outcomes=(failed, *placement.outcomes[1:])),
        with_refusal(reasons=()),
        with_refusal(was_registered=True),
        with_refusal(expected_code="another"),
        replace(result, placements=()),
        replace(result, refusals=refusals[1:]),
    ):
        assert not broken.holds
        assert list(as_text(broken))[-1] == "FAIL"
        assert as_json(broken)["holds"] is False
    assert "byte 7" in "\n".join(as_text(with_placement(comparison=wrong)))


def test_the_exit_status_is_what_the_result_says(
    result: DemoResult, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (placement,) = result.placements
    wrong = replace(result, placements=(replace(placement, prefill_unchanged=False),))
    for given, status in ((result, 0), (wrong, 1)):
        monkeypatch.setattr("kvpd.cli.demo.decode.run_demo", lambda *_, given=given, **__: given)
        assert kvpd.cli.main(["demo", "--placement", "staged"]) == status
        assert ("FAIL" in capsys.readouterr().out) == bool(status)


def test_refusals_say_which_fields(result: DemoResult) -> None:
    by_name = {refusal.name: refusal for refusal in result.refusals}
    given = {
        name: {(reason.field, reason.local, reason.remote) for reason in refusal.reasons}
        for name, refusal in by_name.items()
    }
    assert ("dtype", "bfloat16", "float8_e4m3fn") in given["other element type"]
    assert ("total_kv_heads", "2", "4") in given["other head count"]
    assert isinstance(by_name["untagged"], Refusal)
    assert isinstance(result.placements[0], PlacementResult)


def test_scenarios_that_cannot_be() -> None:
    for make in (
        lambda: replace(SMALL, layers=0),
        lambda: replace(SMALL, blocks=2, requests=3),
        lambda: replace(SMALL, heads=-1),
    ):
        with pytest.raises(FormatError):
            make()
