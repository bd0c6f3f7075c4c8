"""What a client or a router can do to a request hurts that request alone.

One prefill, a decoder that converts its pages and one whose pages are equal (those go through
stock's code). After each bad request a good one is served by the same engines.
"""

from __future__ import annotations

import itertools
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvpd.vllm.sidechannel import Address, ask
from tests.vllm.checks import Colocated, until
from tests.vllm.client import EngineOptions, EngineProcess
from tests.vllm.model import ModelShape
from tests.vllm.pair import decode, kvpd_transfer, prefill, prompts

SHAPE = ModelShape(kv_heads=2, head_dim=64)
BLOCK = 16
PROMPT = 3 * BLOCK
MODES = ["converted", "identical"]
pytestmark = pytest.mark.core
_serial = itertools.count()


class Bed:
    """The three engines."""

    def __init__(self, model: Path, directory: Path) -> None:
        self.directory = directory
        transfer = kvpd_transfer("kv_producer")
        # Blocks of refused requests stay until their lease ends.
        options = EngineOptions(model, "standard", transfer=transfer, num_blocks=1024)
        reading = replace(options, enable_prefix_caching=True)
        self.prefill = EngineProcess("prefill", options, directory)
        self.decoders = {
            "converted": EngineProcess(
                "converted",
                replace(
                    reading,
                    backend="shuffled",
                    transfer=kvpd_transfer("kv_consumer", page_format_conversion=True),
                ),
                directory,
            ),
            "identical": EngineProcess(
                "identical", replace(reading, transfer=kvpd_transfer("kv_consumer")), directory
            ),
        }

    def prefilled(self, prompt: list[int], continued: list[int] | None = None) -> dict[str, Any]:
        """A decode request; with a prompt of its own, if one is given."""
        (request,) = prefill(self.prefill, [prompt])
        return request | {"prompt": list(continued or prompt)}

    def tokens(self, mode: str, request: dict[str, Any]) -> tuple[list[int], str]:
        """What comes of a request, and why it finished."""
        result = decode(self.decoders[mode], [request], self.directory)
        return result.tokens[request["id"]], result.finish_reasons[request["id"]]

    def failed(self, mode: str) -> dict[str, float]:
        """Requests that were ended alone, by reason."""
        key = "vllm:kvpd_failed_requests_total reason="
        metrics = self.decoders[mode].call("metrics")
        return {name.removeprefix(key): n for name, n in metrics.items() if name.startswith(key)}

    def close(self) -> None:
        for engine in (self.prefill, *self.decoders.values()):
            engine.close()


@pytest.fixture(scope="module")
def bed(
    model_of: Callable[[ModelShape], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bed]:
    bed = Bed(model_of(SHAPE), tmp_path_factory.mktemp("requests"))
    yield bed
    bed.close()


def new_prompt(num_tokens: int = PROMPT) -> list[int]:
    """One that no engine has seen."""
    (prompt,) = prompts(1, blocks=num_tokens // BLOCK, block_size=BLOCK, seed=900 + next(_serial))
    return prompt[:num_tokens]


# ---------------------------------------------------------------------- positions


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_hit_blocks", [0, 1, 2, 3])
@pytest.mark.parametrize("num_appended", [1, BLOCK + 1])
def test_a_decode_prompt_that_is_longer_than_its_prefill(
    bed: Bed, colocated: Colocated, mode: str, num_hit_blocks: int, num_appended: int
) -> None:
    """Block i takes block i; what the router appended is computed."""
    prompt = new_prompt()
    longer = prompt + new_prompt(BLOCK * 2)[:num_appended]
    (expected,) = colocated(SHAPE, BLOCK, [longer])
    if num_hit_blocks:
        first = {"id": f"hit-{next(_serial)}", "max_tokens": 1}
        bed.decoders[mode].run([first | {"prompt": longer[: num_hit_blocks * BLOCK + 1]}])
    assert bed.tokens(mode, bed.prefilled(prompt, longer)) == (expected, "length")


@pytest.mark.parametrize("mode", MODES)
def test_a_tail_within_a_block_and_a_longer_prompt(
    bed: Bed, colocated: Colocated, mode: str
) -> None:
    """The last block of the prefill is half full; the decoder fills it up."""
    prompt = new_prompt(PROMPT + BLOCK)[: PROMPT + 5]
    longer = [*prompt, 7, 8, 9]
    (expected,) = colocated(SHAPE, BLOCK, [longer])
    assert bed.tokens(mode, bed.prefilled(prompt, longer)) == (expected, "length")


@pytest.mark.parametrize("mode", MODES)
def test_tokens_that_the_prefill_sampled_are_not_taken_for_the_prompts(
    bed: Bed, colocated: Colocated, mode: str
) -> None:
    """It made six tokens, and the request goes on with others in their place."""
    prompt = new_prompt()
    (request,) = prefill(bed.prefill, [prompt])
    asked = request | {"id": f"more-{next(_serial)}", "max_tokens": 6}
    asked["kv_transfer_params"] = {"do_remote_decode": True, "do_remote_prefill": False}
    done = bed.prefill.run([asked])[asked["id"]]
    assert done["kv_transfer_params"]["remote_num_tokens"] > PROMPT
    other = [*prompt, *((token + 1) % 500 for token in done["tokens"])]
    (expected,) = colocated(SHAPE, BLOCK, [other])
    request |= {"prompt": other, "kv_transfer_params": done["kv_transfer_params"]}
    assert bed.tokens(mode, request) == (expected, "length")


@pytest.mark.parametrize("mode", MODES)
def test_the_longer_of_two_requests_of_one_prefill_comes_first(
    bed: Bed, colocated: Colocated, mode: str
) -> None:
    prompt = new_prompt()
    longer = [*prompt, 3]
    (expected,) = colocated(SHAPE, BLOCK, [longer])
    first = bed.prefilled(prompt, longer)
    second = first | {"id": f"second-{next(_serial)}", "prompt": prompt}
    assert bed.tokens(mode, first) == (expected, "length")
    # Its last block was given back with the others.
    assert bed.tokens(mode, second)[1] == "error"


# ---------------------------------------------------------------------- parameters

# name -> (what the parameters become, the code that is counted)
Change = Callable[[dict[str, Any]], Any]
BAD: dict[str, tuple[Change, str]] = {
    "expiry in words": (lambda p: p | {"remote_blocks_expiry_time": "soon"}, "invalid-params"),
    "ids as floats": (lambda p: p | {"remote_block_ids": [[1.0, 2.0, 3.0]]}, "invalid-params"),
    "ids without groups": (lambda p: p | {"remote_block_ids": [1, 2, 3]}, "invalid-params"),
    "no ids": (lambda p: p | {"remote_block_ids": None}, "invalid-params"),
    "an empty list": (lambda p: p | {"remote_block_ids": []}, "remote-blocks"),
    "an empty group": (lambda p: p | {"remote_block_ids": [[]]}, "remote-blocks"),
    "ids past the end": (lambda p: p | {"remote_block_ids": [[1, 2, 10**6]]}, "remote-blocks"),
    "negative ids": (lambda p: p | {"remote_block_ids": [[1, 2, -3]]}, "invalid-params"),
    "repeated ids": (lambda p: p | {"remote_block_ids": [[1, 2, 1]]}, "remote-blocks"),
    "two groups": (lambda p: p | {"remote_block_ids": [[1, 2, 3], [4]]}, "remote-blocks"),
    "fewer ids": (lambda p: p | {"remote_block_ids": [[1, 2]]},
                  "remote-blocks"),
    "more tokens": (lambda p: p | {"remote_num_tokens": 10_000}, "remote-blocks"),
    "tokens in words": (lambda p: p | {"remote_num_tokens": "48"}, "invalid-params"),
    "two ranks": (lambda p: p | {"tp_size": 2}, "tp-size"),
    "two stages": (lambda p: p | {"pp_size": 2}, "invalid-params"),
    "an engine that is a list": (lambda p: p | {"remote_engine_id": ["a"]}, "invalid-params"),
    "a request that is a map": (lambda p: p | {"remote_request_id": {}}, "invalid-params"),
    "no host": (lambda p: {k: v for k, v in p.items() if k != "remote_host"}, "invalid-params"),
    "a role in words": (lambda p: p | {"do_remote_prefill": "yes"}, "invalid-params"),
    "pushed": (lambda p: p | {"transfer_mode": "push"}, "invalid-params"),
    "no proof": (lambda p: {k: v for k, v in p.items() if k != "kvpd"}, "proof-missing"),
    "a proof of nothing": (lambda p: p | {"kvpd": {"num_tokens": 48, "prompt": 64 * "0"}},
                           "prompt-differs"),
    "a proof of more": (lambda p: p | {"kvpd": p["kvpd"] | {"num_tokens": 4000}},
                        "prompt-differs"),
}  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", BAD)
def test_bad_parameters_end_their_request_only(
    bed: Bed, colocated: Colocated, mode: str, name: str
) -> None:
    change, code = BAD[name]
    bad, good = bed.prefilled(new_prompt()), bed.prefilled(new_prompt())
    bad["kv_transfer_params"] = change(bad["kv_transfer_params"])
    before = bed.failed(mode)
    (expected,) = colocated(SHAPE, BLOCK, [good["prompt"]])
    # Together: what the bad one does, it does while the good one is under way.
    done = bed.decoders[mode].run([bad, good])
    assert done[bad["id"]]["finish_reason"] == "error"
    assert (done[good["id"]]["tokens"], done[good["id"]]["finish_reason"]) == (expected, "length")
    after = bed.failed(mode)
    assert after.get(code, 0) == before.get(code, 0) + 1, bed.decoders[mode].log[-3000:]


@pytest.mark.parametrize("mode", MODES)
def test_another_prompt_of_equal_length_is_refused(bed: Bed, mode: str) -> None:
    request = bed.prefilled(new_prompt(), new_prompt())
    before = bed.failed(mode).get("prompt-differs", 0)
    assert bed.tokens(mode, request)[1] == "error"
    assert bed.failed(mode)["prompt-differs"] == before + 1


@pytest.mark.parametrize("params", ["soon", 5, [1]])
def test_parameters_that_are_no_map_do_not_reach_vllms_scheduler(bed: Bed, params: object) -> None:
    """Its front end stumbles over them first today; the scheduler would end with the engine."""
    found = bed.decoders["converted"].call(
        "evaluate",
        source=f"""
from types import SimpleNamespace
scheduler = engine.scheduler.connector.connector_scheduler
request = SimpleNamespace(
    request_id="r", kv_transfer_params={params!r}, num_prompt_tokens=48, num_tokens=48
)
scheduler.on_new_request(request)
result = [request.kv_transfer_params, scheduler.get_num_new_matched_tokens(request, 32)]
result.append(scheduler.request_finished(request, ([],)))
result.append(list(scheduler._asked))
""",
    )
    assert found == [{"do_remote_prefill": False}, [16, True], [False, None], []]


def test_a_first_handshake_at_a_wrong_address_spoils_no_other(
    bed: Bed, colocated: Colocated, model_of: Callable[[ModelShape], Path], tmp_path: Path
) -> None:
    """A decoder that knows nobody: the bad one names the good one's engine, and comes first."""
    transfer = kvpd_transfer("kv_consumer", page_format_conversion=True)
    options = EngineOptions(model_of(SHAPE), "shuffled", transfer=transfer)
    with socket.socket() as silent, EngineProcess("decode", options, tmp_path) as engine:
        _ = engine.facts
        # It takes connections and never says a word.
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        bad, ranks = bed.prefilled(new_prompt()), bed.prefilled(new_prompt())
        good = bed.prefilled(new_prompt())
        (expected,) = colocated(SHAPE, BLOCK, [good["prompt"]])
        bad["kv_transfer_params"]["remote_port"] = silent.getsockname()[1]
        ranks["kv_transfer_params"]["tp_size"] = 2
        done = engine.run([bad, ranks, good])
        assert done[bad["id"]]["finish_reason"] == "error"
        assert done[ranks["id"]]["finish_reason"] == "error"
        assert done[good["id"]]["tokens"] == expected


def test_any_bytes_on_the_side_channel_are_survived(bed: Bed) -> None:
    """Of a stock engine each of these ends the listener, and no peer shakes hands any more."""
    import zmq

    port = bed.prefill.call(
        "evaluate",
        source="result = engine.scheduler.connector.connector_scheduler.side_channel_port",
    )
    address = Address("127.0.0.1", port)
    expected = ask(address, 0, timeout_seconds=5)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        for parts in (
            [b""],
            [b"x"],
            [b"", b""],
            [b"", b"\xc1"],
            [b"", b"\x93\xacget_meta_msg\x00\x07"],
            [b"", b"\x93\xc4\x0cget_meta_msg\x00\x07"],
            [b"", b"\x93\xc4\x0cget_meta_msg\x00\xa1x"],
            [b"", 100 * b"\x91"],
            [b"", 4000 * b"x"],
            [b"", b"a", b"b", b"c"],
        ):
            peer = context.socket(zmq.DEALER)
            peer.connect(f"tcp://{address}")
            peer.send_multipart(parts)
            peer.close(linger=500)
        for garbage in (b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 8, b"\xff" * 64):
            with socket.create_connection(("127.0.0.1", port)) as plain:
                plain.sendall(garbage)
    finally:
        context.destroy(linger=500)
    assert ask(address, 0, timeout_seconds=5)[:200] == expected[:200]


def test_a_rank_that_is_not_there_is_answered_at_once(bed: Bed) -> None:
    from kvpd.errors import SideChannelError

    port = bed.prefill.call(
        "evaluate",
        source="result = engine.scheduler.connector.connector_scheduler.side_channel_port",
    )
    with pytest.raises(SideChannelError) as caught:
        ask(Address("127.0.0.1", port), 3, timeout_seconds=5)
    assert caught.value.code == "malformed-reply"


def test_the_prefill_knows_nothing_of_failed_requests(bed: Bed) -> None:
    """Runs last: all that was prefilled was released, or its lease will; no lists grow."""
    for engine in bed.decoders.values():
        until(
            lambda engine=engine: (
                not engine.call(  # type: ignore[misc]
                    "evaluate",
                    source="""
worker = engine.connector_worker()
scheduler = engine.scheduler.connector.connector_scheduler
result = [
    *worker._leased, *worker._recving_metadata, *worker._recv_failures, *worker._postponed,
    *scheduler._asked, *scheduler._refused, *scheduler._heartbeat_req_engine,
]
""",
                )
            )
        )
