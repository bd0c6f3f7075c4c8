"""A converter that a backend brings itself, through the receiver: pages that are no permutation."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("torch")
pytest.importorskip("nixl")

import numpy as np
import torch

from kvpd import EngineDescription, negotiate, wire
from kvpd._kvpd import cache_regions
from kvpd.cli.demo.facts import engine_facts
from kvpd.convert import register_converter, registered_pairs, registry
from kvpd.errors import ConversionError, RefusedError
from kvpd.nixl import MemoryRange
from kvpd.receive import PlacementChoice, Receiver
from kvpd.request import Outcome, Ready
from kvpd.vllm.converters import register_converters
from tests.receive_bench import SCENARIO, A, B, Bench, Maker
from tests.vllm.keyed import KeyedConversion, converters, keyed_format
from tests.vllm.oracle import PageShape

pytest_plugins = ("tests.receive_fixtures",)

SHAPE = {
    "heads": SCENARIO.heads,
    "tokens": SCENARIO.tokens,
    "head_dim": SCENARIO.head_dim,
    "dtype": SCENARIO.dtype,
}
FORMAT = keyed_format(**SHAPE)  # type: ignore[arg-type]
POISON = 0x5C


@pytest.fixture(autouse=True)
def _no_leftovers() -> Iterator[None]:
    before = dict(registry._converters)
    registry._converters.clear()
    yield
    registry._converters.clear()
    registry._converters.update(before)


class Backend:
    """What the connector is given: a class that has the hook."""

    @classmethod
    def kvpd_converters(cls, target: object) -> object:
        assert target == FORMAT
        return converters(FORMAT)


class KeyedCache:
    """A cache of keyed pages, poisoned, registered with the bench's decode agent."""

    def __init__(self, bench: Bench) -> None:
        blocks = SCENARIO.decode_blocks
        size = SCENARIO.layers * blocks * FORMAT.page_bytes
        self.pages = np.full(size, POISON, dtype=np.uint8)
        self.pages.shape = (SCENARIO.layers, blocks, FORMAT.page_bytes)
        regions = cache_regions(
            FORMAT,
            "LBHNC",
            address=self.pages.ctypes.data,
            num_blocks=blocks,
            layers=SCENARIO.layer_names,
        )
        self.description = EngineDescription(engine_facts(SCENARIO, "LBHNC", "keyed"), regions)
        self.tensor = torch.from_numpy(self.pages)
        self._agent = bench.agent
        self._registration = bench.agent.register([MemoryRange.of(region) for region in regions])

    def receiver(self, *, convert: bool, placement: PlacementChoice) -> Receiver:
        return Receiver(
            self._agent,
            self.description,
            [self.tensor],
            convert=convert,
            placement=placement,
            slab_bytes=2 * SCENARIO.layers * FORMAT.page_bytes,
        )

    def close(self) -> None:
        self._agent.deregister(self._registration)


@pytest.fixture
def bench(make: Maker) -> Bench:
    return make("in_place")


@pytest.fixture
def cache(bench: Bench) -> Iterator[KeyedCache]:
    cache = KeyedCache(bench)
    yield cache
    cache.close()


def test_pages_that_are_no_permutation(
    bench: Bench, cache: KeyedCache, placement: PlacementChoice
) -> None:
    for _ in range(2):  # engines of one process share the backend
        register_converters([Backend, object], FORMAT)
    receiver = cache.receiver(convert=True, placement=placement)
    peer = receiver.add_peer(bench.handshake)
    assert peer.verdict.kind == "convert"
    made = [one for cuts in peer.conversions.values() for cut in cuts for one in cut]
    assert made and all(isinstance(one, KeyedConversion) for one in made)
    local, remote = SCENARIO.decode_ids(), SCENARIO.prefill_ids()
    for name in (A, B):
        receiver.start(name, peer, local[name], remote[name])
    outcomes: list[Outcome] = []

    def ended() -> bool:
        outcomes.extend(receiver.poll())
        return len(outcomes) == 2

    bench.until(ended)
    assert all(isinstance(outcome, Ready) for outcome in outcomes)
    source = bench.memory.reshape(SCENARIO.layers, SCENARIO.prefill_blocks, -1)
    shape = PageShape(SCENARIO.heads, SCENARIO.tokens, SCENARIO.head_dim, SCENARIO.dtype)
    expected = np.full_like(cache.pages, POISON)
    for name in (A, B):
        expected[:, local[name]] = shape.keyed(source[:, remote[name]])
        assert not np.array_equal(expected[:, local[name]], source[:, remote[name]])
    assert np.array_equal(cache.pages, expected)
    receiver.close()


@pytest.mark.parametrize(
    ("registered", "convert", "code"),
    [(True, False, "conversion-disabled"), (False, True, "components")],
)
def test_refused_without_conversion_or_without_the_converter(
    bench: Bench, cache: KeyedCache, registered: bool, convert: bool, code: str
) -> None:
    if registered:
        register_converters([Backend], FORMAT)
    receiver = cache.receiver(convert=convert, placement="in_place")
    with pytest.raises(RefusedError) as caught:
        receiver.add_peer(bench.handshake)
    assert code in [reason.code for reason in caught.value.verdict.reasons]
    assert bench.agent.peers == [] and (cache.pages == POISON).all()
    receiver.close()


def test_the_other_direction_is_not_brought_in(bench: Bench, cache: KeyedCache) -> None:
    """Keyed pages on the prefill: the hook speaks of the pages its own backend keeps."""
    register_converters([Backend], FORMAT)
    pairs = registered_pairs()
    there = bench.handshake.description
    assert negotiate(cache.description, there, convert=True, converters=pairs).kind == "convert"
    assert negotiate(there, cache.description, convert=True, converters=pairs).kind == "refuse"


def test_two_backends_must_not_race_for_a_pair() -> None:
    ((source, _),) = converters(FORMAT)

    def other(*pages: object) -> KeyedConversion:
        raise AssertionError(pages)

    register_converter(source, FORMAT, other)
    with pytest.raises(ConversionError) as caught:
        register_converters([Backend], FORMAT)
    assert caught.value.code == "duplicate-converter"


def test_the_tag_of_keyed_pages_survives_the_wire(cache: KeyedCache) -> None:
    sent = wire.Handshake("keyed", cache.description)
    assert wire.decode_tag(wire.encode_tag(sent)).description.format == FORMAT
