"""Blocks that were read are taken only if the prefill says that it still held them.

One prefill, a decoder that converts its pages and one whose pages are equal (those go through
stock's code, whose READ carries the notice). Where the prefill lets go of blocks its whole cache is
overwritten: what is read from then on is another's.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvpd.vllm.sidechannel import Address, ask
from tests.vllm.checks import Colocated, until
from tests.vllm.client import EngineProcess
from tests.vllm.model import ModelShape
from tests.vllm.pair import prompts
from tests.vllm.test_requests import BLOCK, MODES, SHAPE, Bed

pytestmark = pytest.mark.core
_serial = itertools.count(5000)
OTHER = {"converted": "identical", "identical": "converted"}
RECORDS = "engine.scheduler.connector.connector_scheduler._records"


class HeldBed(Bed):
    """The same engines; reads of the decoders can be withheld."""

    def __init__(self, model: Path, directory: Path) -> None:
        super().__init__(model, directory)
        evaluate(self.decoders["converted"], "from tests.vllm import fakes; fakes.install(worker)")
        evaluate(
            self.decoders["identical"],
            "from tests.vllm.fakes import ControlledReads\n"
            "worker.fake = worker.nixl_wrapper = ControlledReads(worker.nixl_wrapper)",
        )

        # Whether the record of a request is there still when vLLM frees its blocks.
        evaluate(
            self.prefill,
            f"""
records, free = {RECORDS}, engine.scheduler._free_blocks
engine.freed = []
def watched(request, *more, **options):
    engine.freed.append(request.request_id in records._held)
    return free(request, *more, **options)
engine.scheduler._free_blocks = watched
""",
        )

    def overwrite(self) -> None:
        """Every block of the prefill is somebody else's now."""
        self.prefill.call("poison", seed=next(_serial))

    def num_held(self) -> int:
        return int(evaluate(self.prefill, f"result = {RECORDS}.num_held"))

    def withhold(self, mode: str, is_withheld: bool) -> None:
        """Whether the decoder learns that its reads have ended."""
        evaluate(self.decoders[mode], f"worker.fake.withhold = {is_withheld}")

    def submit(self, mode: str, request: dict[str, Any]) -> None:
        """Begin to read, and do not learn of the end."""
        self.withhold(mode, True)
        self.decoders[mode].call("submit", requests=[request])
        source = "result = len(worker._recving_transfers)"
        until(lambda: evaluate(self.decoders[mode], source) > 0)
        source = "result = worker.fake.polls"
        polls = int(evaluate(self.decoders[mode], source))
        until(lambda: int(evaluate(self.decoders[mode], source)) > polls + 3)

    def finish(self, mode: str, request: dict[str, Any]) -> tuple[list[int], str]:
        self.withhold(mode, False)
        done = self.decoders[mode].wait([request["id"]])[request["id"]]
        return done["tokens"], done["finish_reason"]

    def lease_ends(self, request: dict[str, Any]) -> None:
        """On the prefill, whatever the decoders' heartbeats and settings are."""
        name = request["kv_transfer_params"]["remote_request_id"]
        num_held = self.num_held()
        evaluate(self.prefill, f"worker._reqs_to_send[{name!r}] = 0.0")
        until(lambda: self.num_held() == num_held - 1)
        self.overwrite()

    def is_not_held(self, mode: str, request: dict[str, Any], code: str = "not-held") -> None:
        """A request fails, and counts once."""
        before = self.failed(mode).get(code, 0)
        assert self.tokens(mode, request)[1] == "error"
        until(lambda: self.failed(mode).get(code, 0) == before + 1)


def evaluate(engine: EngineProcess, source: str) -> Any:
    return engine.call("evaluate", source=f"worker = engine.connector_worker()\n{source}")


@pytest.fixture(scope="module")
def bed(
    model_of: Callable[[ModelShape], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[HeldBed]:
    bed = HeldBed(model_of(SHAPE), tmp_path_factory.mktemp("held"))
    yield bed
    bed.close()


@pytest.fixture
def prompt() -> list[int]:
    (prompt,) = prompts(1, blocks=3, block_size=BLOCK, seed=next(_serial))
    return prompt


@pytest.mark.parametrize("mode", MODES)
def test_a_second_decoder_of_one_prefill(
    bed: HeldBed, colocated: Colocated, mode: str, prompt: list[int]
) -> None:
    """It knows nothing of the first one, whose notice let the prefill reuse the blocks."""
    (expected,) = colocated(SHAPE, BLOCK, [prompt])
    request = bed.prefilled(prompt)
    num_held = bed.num_held()
    assert bed.tokens(OTHER[mode], request) == (expected, "length")
    until(lambda: bed.num_held() == num_held - 1)
    bed.overwrite()
    bed.is_not_held(mode, request | {"id": f"second-{next(_serial)}"})
    # It was the request, and not the pair.
    (expected,) = colocated(SHAPE, BLOCK, [prompt[1:]])
    assert bed.tokens(mode, bed.prefilled(prompt[1:])) == (expected, "length")


@pytest.mark.parametrize("mode", MODES)
def test_a_lease_that_ended_while_the_decoder_thinks_it_goes_on(
    bed: HeldBed, mode: str, prompt: list[int]
) -> None:
    request = bed.prefilled(prompt)
    bed.lease_ends(request)
    bed.is_not_held(mode, request)


@pytest.mark.parametrize("mode", MODES)
def test_late_but_held_is_served(
    bed: HeldBed, colocated: Colocated, mode: str, prompt: list[int]
) -> None:
    """By the decoder's clock the lease ends while it reads; the prefill holds the blocks."""
    (expected,) = colocated(SHAPE, BLOCK, [prompt])
    request = bed.prefilled(prompt)
    params = request["kv_transfer_params"]
    # The lease is 300 s, of which the decoder takes off 2 for clocks and delivery.
    params["remote_blocks_expiry_time"] -= 296.5
    began = time.monotonic()
    bed.submit(mode, request)
    time.sleep(max(0.0, began + 2.0 - time.monotonic()))
    assert bed.finish(mode, request) == (expected, "length")


def test_what_the_own_notice_released_is_served(
    bed: HeldBed, colocated: Colocated, prompt: list[int]
) -> None:
    """Stock's READ carries it: the blocks may be reused before the decoder asks."""
    (expected,) = colocated(SHAPE, BLOCK, [prompt])
    request = bed.prefilled(prompt)
    num_held = bed.num_held()
    bed.submit("identical", request)
    until(lambda: bed.num_held() == num_held - 1)
    bed.overwrite()
    assert bed.finish("identical", request) == (expected, "length"), bed.decoders["identical"].log[
        -3000:
    ]


def test_a_request_that_is_aborted_does_not_release_what_another_reads(
    bed: HeldBed, colocated: Colocated, prompt: list[int]
) -> None:
    (expected,) = colocated(SHAPE, BLOCK, [prompt])
    request = bed.prefilled(prompt)
    num_held = bed.num_held()
    bed.submit("converted", request)
    twin = request | {"id": f"twin-{next(_serial)}"}
    evaluate(
        bed.decoders["converted"],
        f"engine.do_submit([{twin!r}])\nengine.do_abort([{twin['id']!r}])",
    )
    time.sleep(0.3)
    assert bed.num_held() == num_held
    assert bed.finish("converted", request) == (expected, "length")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "event",
    [
        pytest.param(f"{RECORDS}.begin([bytes(16)])", id="restarted"),
        pytest.param("engine.scheduler.reset_prefix_cache(reset_connector=True)", id="reset"),
    ],
)
def test_a_prefill_that_begins_anew_holds_nothing_of_before(
    bed: HeldBed, colocated: Colocated, mode: str, event: str, prompt: list[int]
) -> None:
    """A restart gives other ids of the start; before sleep vLLM resets what connectors hold."""
    request = bed.prefilled(prompt)
    evaluate(bed.prefill, f"engine.starts = {RECORDS}._starts\n{event}")
    bed.is_not_held(mode, request)
    evaluate(bed.prefill, f"{RECORDS}.begin(engine.starts)")
    (expected,) = colocated(SHAPE, BLOCK, [prompt[1:]])
    assert bed.tokens(mode, bed.prefilled(prompt[1:])) == (expected, "length")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("field", ["request", "ids", "tokens"])
def test_parameters_that_are_not_as_the_prefill_gave_them(
    bed: HeldBed, mode: str, field: str, prompt: list[int]
) -> None:
    """Each fits the peer, the prompt and itself; only the prefill knows better."""
    request, other = bed.prefilled(prompt), bed.prefilled(prompt[::-1])
    params = request["kv_transfer_params"]
    if field == "request":
        params["kvpd"]["request"] = other["kv_transfer_params"]["kvpd"]["request"]
    elif field == "ids":
        params["remote_block_ids"] = other["kv_transfer_params"]["remote_block_ids"]
    else:
        params["remote_num_tokens"] += 1
        params["kvpd"]["prompt"] = None
    bed.is_not_held(mode, request)


@pytest.mark.parametrize("mode", MODES)
def test_without_an_answer_nothing_is_taken(bed: HeldBed, mode: str, prompt: list[int]) -> None:
    decoder, request = bed.decoders[mode], bed.prefilled(prompt)
    evaluate(
        decoder,
        """
from kvpd.vllm.sidechannel import Address
(owners,) = worker._owners.values()
worker.owned = dict(owners)
owners.update({rank: (Address("127.0.0.1", 9), start) for rank, (_, start) in owners.items()})
worker._asker._timeout_seconds = 0.3
""",
    )
    bed.is_not_held(mode, request, "held-unanswered")
    evaluate(
        decoder,
        "(owners,) = worker._owners.values(); owners.update(worker.owned)\n"
        "worker._asker._timeout_seconds = 2.0",
    )
    again = request | {"id": f"again-{next(_serial)}"}
    if mode == "converted":
        # No notice was sent: the prefill has the blocks still.
        assert bed.tokens(mode, again)[1] == "length"
    else:
        assert bed.tokens(mode, again)[1] == "error"


def test_any_question_is_survived(bed: HeldBed) -> None:
    import msgspec
    import zmq

    from kvpd.vllm.held import WHAT, Question, Reply, new_id

    source = "result = engine.scheduler.connector.connector_scheduler.side_channel_port"
    address = Address("127.0.0.1", bed.prefill.call("evaluate", source=source))
    good = Question(WHAT, 5, (new_id(),), new_id(), new_id() + new_id(), new_id()).encode()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        peer = context.socket(zmq.DEALER)
        peer.connect(f"tcp://{address}")
        peer.setsockopt(zmq.RCVTIMEO, 5000)
        bad = [good[:cut] for cut in range(0, len(good), 7)]
        bad += [good[:at] + bytes([good[at] ^ 0xFF]) + good[at + 1 :] for at in range(12)]
        bad += [good + b"x", good * 8, msgspec.msgpack.encode([WHAT] * 6)]
        for message in bad:
            peer.send_multipart([b"", message])
            frame, answer = peer.recv_multipart()
            assert (frame, answer) == (b"", b"") or Reply.decode(answer) is not None
            assert len(answer) <= len(message)
        peer.send_multipart([b"", good])
        reply = Reply.decode(peer.recv_multipart()[1])
        assert reply is not None and (reply.number, reply.answer) == (5, 0)
    finally:
        context.destroy(linger=0)
    assert ask(address, 0, timeout_seconds=5)


def test_the_real_listener_and_the_real_asker_over_ipv6(bed: HeldBed) -> None:
    import socket

    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
            port = probe.getsockname()[1]
    except OSError:
        pytest.skip("no IPv6 on the loopback")
    found = bed.prefill.call(
        "evaluate",
        source=f"""
import threading, time
from kvpd.vllm.adapter.listener import serve_handshakes
from kvpd.vllm.asker import Asker, Inquiry
from kvpd.vllm.held import WHAT, Question, Records, new_id
from kvpd.vllm.sidechannel import Address
records, ready, stopped, start = Records(), threading.Event(), threading.Event(), new_id()
records.begin([start])
request = records.enter("r", bytes(32))
arguments = ({{}}, ready, stopped, "::1", {port}, records)
threading.Thread(target=serve_handshakes, args=arguments, daemon=True).start()
ready.wait(5)
asker = Asker(2.0)
question = Question(WHAT, 0, (start,), request, bytes(32), new_id())
while (result := asker.is_held("r", Inquiry(Address("::1", {port}), question))) is None:
    time.sleep(0.001)
asker.close()
stopped.set()
""",
    )
    assert found == "held"


def test_the_round_trip_is_short(bed: HeldBed, prompt: list[int]) -> None:
    """Nobody waits for a step of the prefill: its listener is a thread."""
    for index in range(3):
        assert bed.tokens("converted", bed.prefilled([*prompt, index]))[1] == "length"
    metrics = bed.decoders["converted"].call("metrics")
    name = "vllm:kvpd_held_seconds"
    assert metrics[f"{name}_count"] >= 3
    assert metrics[f"{name}_sum"] / metrics[f"{name}_count"] < 1.0


def test_what_several_ranks_gave_back_comes_together(bed: HeldBed) -> None:
    """Each rank of a prefill tells its part, in another step maybe, from another process."""
    found = bed.prefill.call(
        "evaluate",
        source="""
import pickle
from kvpd.vllm.adapter import Releases
first, second = (
    pickle.loads(pickle.dumps(Releases({bytes([rank]) * 16: {"r": frozenset([agent])}})))
    for rank, agent in enumerate((b"a", b"b"))
)
both = first.aggregate(second)
result = [bool(both), sorted((k.hex()[:2], *v["r"]) for k, v in both.agents.items()) == [
    ("00", b"a"), ("01", b"b")], len(first.agents), engine.connector_worker().take_releases()]
""",
    )
    assert found == [True, True, 1, None]


def test_records_end_before_blocks_are_freed(bed: HeldBed) -> None:
    """All that the tests above released, in vLLM's own order of calls."""
    freed = evaluate(bed.prefill, "result = engine.freed")
    assert len(freed) >= 10 and not any(freed)


def test_nothing_is_left(bed: HeldBed) -> None:
    """Runs last."""
    left = "result = [*worker._inquiries, *worker._asker._asked, *worker._asker._numbers]"
    for engine in bed.decoders.values():
        assert evaluate(engine, left) == []
