"""The link's decision who serves an accepted peer; NIXL is real, vLLM is not needed."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("nixl")

from kvpd import EngineDescription, EngineFacts, KvpdError, RefusedError, negotiate
from kvpd.vllm.config import ConnectorConfig
from kvpd.vllm.judgement import Judgement, Local
from kvpd.vllm.link import Link
from tests.receive_bench import Bench, Maker

pytest_plugins = ("tests.receive_fixtures",)


class Counted:
    """Where the link counts."""

    def __init__(self) -> None:
        self.refusals: list[str] = []

    def record_refusal(self, codes: Sequence[str]) -> None:
        self.refusals.extend(codes)

    def record_untagged_peer(self) -> None:
        raise AssertionError("every peer here is tagged")


def link_of(bench: Bench, counted: Counted, **keys: Any) -> Link:
    return Link(
        bench.agent,
        Local(bench.cache.description),
        [bench.cache.tensor],
        ConnectorConfig(**keys),
        counted,
        lambda: bench.now,
        max_request_pages=8,
    )


def equal_peer(bench: Bench, *, is_whole: bool) -> Judgement:
    """A peer that keeps what we keep."""
    ours = bench.cache.description
    theirs = type(bench.handshake)("twin", ours)
    return Judgement(negotiate(ours, ours), theirs, is_whole)


@pytest.mark.parametrize("is_allowed", [True, False])
def test_the_receiver_takes_other_weights_where_the_link_does(
    make: Maker, is_allowed: bool
) -> None:
    """Both judge; a pair that is accepted by one alone would never be read."""
    bench, counted = make("in_place"), Counted()
    theirs = bench.handshake.description
    names = inspect.signature(EngineFacts).parameters
    facts = {name: getattr(theirs.facts, name) for name in names} | {"model_weights": "other"}
    other = EngineDescription(EngineFacts(**facts), theirs.regions)
    handshake = replace(bench.handshake, description=other)
    link = link_of(bench, counted, page_format_conversion=True, allow_other_weights=is_allowed)
    verdict = negotiate(bench.cache.description, other, convert=True, allow_other_weights=True)
    judgement = Judgement(verdict, handshake, is_whole=True)
    if is_allowed:
        assert link.connect(judgement, handshake.nixl_metadata) is not None
        assert counted.refusals == []
    else:
        with pytest.raises(RefusedError):
            link.connect(judgement, handshake.nixl_metadata)
        assert counted.refusals == ["model-weights"]
    link.close()


@pytest.mark.parametrize("is_whole", [True, False])
def test_equal_pages_are_stocks_where_they_are_not_read_directly(
    make: Maker, is_whole: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Once with words why, and no refusal: the peer is served, by stock."""
    bench, counted = make("in_place"), Counted()
    link = link_of(bench, counted, direct_transfer=True)
    with caplog.at_level(logging.INFO, "vllm.kvpd"):
        for _ in range(2):
            assert link.connect(equal_peer(bench, is_whole=is_whole), b"") is None
    assert not link.serves("twin") and counted.refusals == [] and bench.agent.peers == []
    reason = "does not offer its memory" if is_whole else "not one page of every region"
    assert [reason in line for line in caplog.messages] == [True]
    link.close()


def test_whatever_else_goes_wrong_is_said_and_counted(
    make: Maker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench, counted = make("in_place"), Counted()
    link = link_of(bench, counted, direct_transfer=True)

    def fail(*_: Any, **__: Any) -> Any:
        raise KvpdError("NIXL is upset", code="nixl", field="peer")

    monkeypatch.setattr("kvpd.receive.connect", fail)
    with pytest.raises(KvpdError):
        link.connect(equal_peer(bench, is_whole=True), b"")
    assert counted.refusals == ["nixl"]
    assert any("NIXL is upset" in line for line in caplog.messages)
    link.close()


def test_a_peer_the_receiver_let_go_of_is_forgotten(make: Maker) -> None:
    bench, counted = make("in_place"), Counted()
    link = link_of(bench, counted, page_format_conversion=True)
    verdict = negotiate(bench.cache.description, bench.handshake.description, convert=True)
    judgement = Judgement(verdict, bench.handshake, is_whole=True)
    peer = link.connect(judgement, bench.handshake.nixl_metadata)
    assert peer is not None and link.serves(bench.handshake.engine_id)
    assert link.disconnected() == []
    peer.is_leaving = True  # as a device error leaves it
    # Not yet: something of it may still be read.
    assert link.disconnected() == []
    link.poll()
    assert link.disconnected() == [bench.handshake.engine_id]
    link.disconnect(bench.handshake.engine_id)
    assert (
        link.disconnected() == []
        and not link.serves(bench.handshake.engine_id)
        and bench.agent.peers == []
    )
    # Its next request shakes hands again.
    assert link.connect(judgement, bench.handshake.nixl_metadata) is not None
    link.close()


def test_peers_may_connect_while_the_engine_looks_who_left(make: Maker) -> None:
    """Handshakes run on a thread of their own; the engine's looks at every step."""
    bench, counted = make("in_place"), Counted()
    link = link_of(bench, counted, page_format_conversion=True)

    class Meanwhile:
        @property
        def is_leaving(self) -> bool:
            link._peers.setdefault("another", self)  # type: ignore[arg-type]
            return False

    link._peers["first"] = Meanwhile()  # type: ignore[assignment]
    assert link.disconnected() == []
    link.close()


def test_a_peer_dropped_by_its_handshake_is_let_go_of_by_the_next_poll(make: Maker) -> None:
    bench, counted = make("in_place"), Counted()
    link = link_of(bench, counted, page_format_conversion=True)
    handshake = bench.handshake
    verdict = negotiate(bench.cache.description, handshake.description, convert=True)
    assert link.connect(Judgement(verdict, handshake, True), handshake.nixl_metadata) is not None
    link.drop(handshake.engine_id)
    assert not link.serves(handshake.engine_id)
    assert len(bench.agent.peers) == 1, "the handshake's thread releases nothing"
    link.poll()
    assert bench.agent.peers == [] and bench.agent.rows == []
    link.close()
