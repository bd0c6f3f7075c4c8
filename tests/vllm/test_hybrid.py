"""Models with several KV groups: full attention beside sliding windows, with equal pages.

Their requests go through stock's code, with blocks that kvpd paired. A window's list ends with the
block of the last computed token and begins anywhere, so an error of one block shows in the tokens.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.checks import until
from tests.vllm.client import EngineOptions, EngineProcess
from tests.vllm.model import VOCABULARY, ModelShape, ModelSize, build_model
from tests.vllm.pair import (
    DECODE_TOKENS,
    Pair,
    kvpd_transfer,
    pair_options,
    prefill,
    stock_transfer,
)

# Rounding must not decide between two tokens: prompts are cut into other batches here and there.
SHAPE = ModelShape(kv_heads=2, head_dim=64, dtype="float32")
BLOCK = 16
# Two and a half blocks: where a window begins within a block, it is one block more.
WINDOW = 40
# Three KV groups, which share all regions.
SIZE = ModelSize(layers=6, window=WINDOW, windowed=(0, 1, 3, 4))
# Two, of five layers and four: one region belongs to one group alone.
UNEVEN = ModelSize(layers=9, window=WINDOW, windowed=(0, 2, 4, 6))
PROMPT = 7 * BLOCK
pytestmark = pytest.mark.core
_serial = itertools.count()


class Bed:
    """A prefill, a decoder with a prefix cache, and an engine that does both by itself."""

    def __init__(self, model: Path, directory: Path, **decode: Any) -> None:
        transfer = kvpd_transfer("kv_producer")
        # Blocks of refused requests stay until their lease ends.
        options = EngineOptions(
            model, "standard", dtype=SHAPE.dtype, transfer=transfer, num_blocks=1024
        )
        self.prefill = EngineProcess("prefill", options, directory)
        reading = replace(options, enable_prefix_caching=True)
        transfer = kvpd_transfer("kv_consumer", **decode)
        self.decode = EngineProcess("decode", replace(reading, transfer=transfer), directory)
        self.alone = EngineProcess("alone", replace(options, transfer=None), directory)

    def prefilled(
        self, prompt: list[int], continued: list[int] | None = None, num_sampled: int = 1
    ) -> dict[str, Any]:
        """A decode request; with a prompt of its own, if one is given."""
        if num_sampled == 1:
            (request,) = prefill(self.prefill, [prompt])
        else:
            request = self._sampled(prompt, num_sampled)
        return request | {"prompt": list(continued or prompt)}

    def _sampled(self, prompt: list[int], count: int) -> dict[str, Any]:
        request: dict[str, Any] = {
            "id": f"sampled-{next(_serial)}",
            "prompt": prompt,
            "max_tokens": count,
            "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False},
        }
        done = self.prefill.run([request])[request["id"]]
        assert done["kv_transfer_params"]["remote_num_tokens"] > len(prompt)
        params = done["kv_transfer_params"]
        return request | {"max_tokens": DECODE_TOKENS, "kv_transfer_params": params}

    def tokens(self, request: dict[str, Any]) -> tuple[list[int], str]:
        """What comes of a request, and why it finished."""
        done = self.decode.run([request])[request["id"]]
        return done["tokens"], done["finish_reason"]

    def expected(self, prompt: list[int]) -> tuple[list[int], str]:
        """The same of one engine, without any connector."""
        name = f"alone-{next(_serial)}"
        request = {"id": name, "prompt": prompt, "max_tokens": DECODE_TOKENS}
        done = self.alone.run([request])[name]
        return done["tokens"], done["finish_reason"]

    def hit(self, prompt: list[int], num_blocks: int) -> None:
        """Let the decoder have leading blocks of a prompt."""
        if num_blocks:
            start = prompt[: num_blocks * BLOCK + 1]
            self.decode.run([{"id": f"hit-{next(_serial)}", "prompt": start, "max_tokens": 1}])

    def failed(self) -> dict[str, float]:
        """Requests that were ended alone, by reason."""
        key = "vllm:kvpd_failed_requests_total reason="
        metrics = self.decode.call("metrics")
        return {name.removeprefix(key): n for name, n in metrics.items() if name.startswith(key)}

    def groups(self, engine: EngineProcess) -> list[tuple[str, int]]:
        """Class and layers of each KV group."""
        found = engine.call(
            "evaluate",
            source="""
groups = engine.scheduler.kv_cache_config.kv_cache_groups
result = [(type(g.kv_cache_spec).__name__, len(g.layer_names)) for g in groups]
""",
        )
        return [(name, count) for name, count in found]

    def close(self) -> None:
        for engine in (self.prefill, self.decode, self.alone):
            engine.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(tmp_path_factory.mktemp("models"), SHAPE, SIZE)


@pytest.fixture(scope="module")
def bed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    bed = Bed(model, tmp_path_factory.mktemp("hybrid"))
    yield bed
    bed.close()


def new_prompt(num_tokens: int = PROMPT) -> list[int]:
    """One that no engine has seen."""
    source = random.Random(7000 + next(_serial))
    return [source.randrange(VOCABULARY - 1) for _ in range(num_tokens)]


def test_the_engines_have_several_groups(bed: Bed) -> None:
    groups = [("FullAttentionSpec", 2), ("SlidingWindowSpec", 2), ("SlidingWindowSpec", 2)]
    for engine in (bed.prefill, bed.decode, bed.alone):
        assert sorted(bed.groups(engine)) == groups
        assert engine.facts["implementations"] == ["StandardAttention"]


# ---------------------------------------------------------------------- positions


@pytest.mark.parametrize("num_appended", [0, 1, BLOCK + 1])
@pytest.mark.parametrize("num_hit_blocks", [0, 1, 3, 4, 6])
def test_block_i_of_each_group_takes_block_i(
    bed: Bed, num_hit_blocks: int, num_appended: int
) -> None:
    prompt = new_prompt()
    longer = prompt + new_prompt()[:num_appended]
    bed.hit(longer, num_hit_blocks)
    assert bed.tokens(bed.prefilled(prompt, longer)) == bed.expected(longer)


@pytest.mark.parametrize("num_appended", [0, 1, BLOCK + 1])
@pytest.mark.parametrize(
    "num_tokens",
    [1, BLOCK + 4, WINDOW - 1, WINDOW, WINDOW + 1, 4 * BLOCK - 1, 4 * BLOCK + 7, 5 * BLOCK + 8],
)
def test_prompts_shorter_and_longer_than_a_window(
    bed: Bed, num_tokens: int, num_appended: int
) -> None:
    prompt = new_prompt(num_tokens)
    longer = prompt + new_prompt()[:num_appended]
    assert bed.tokens(bed.prefilled(prompt, longer)) == bed.expected(longer)


@pytest.mark.parametrize("num_tokens", range(WINDOW, WINDOW + 3 * BLOCK))
@pytest.mark.slow
def test_a_window_that_begins_anywhere_in_a_block(bed: Bed, num_tokens: int) -> None:
    """Stock is wrong where it begins with one: it computes the last token again without it."""
    prompt = new_prompt(num_tokens)
    assert bed.tokens(bed.prefilled(prompt)) == bed.expected(prompt)


def test_several_requests_at_once(bed: Bed) -> None:
    batch = [new_prompt(n) for n in (30, 75, PROMPT, 9 * BLOCK + 3)]
    longer = [[*prompt, 5] for prompt in batch]
    requests = [bed.prefilled(p, n) for p, n in zip(batch, longer, strict=True)]
    done = bed.decode.run(requests)
    for request, prompt in zip(requests, longer, strict=True):
        entry = done[request["id"]]
        assert (entry["tokens"], entry["finish_reason"]) == bed.expected(prompt)


@pytest.mark.parametrize("num_sampled", [2, 6, BLOCK, 2 * BLOCK + 2])
def test_a_prefill_that_sampled_is_served_right_or_refused_by_name(
    bed: Bed, num_sampled: int
) -> None:
    """Its windows have gone on; blocks that it gave back are no source."""
    prompt = new_prompt()
    before = bed.failed().get("remote-blocks", 0)
    got = bed.tokens(bed.prefilled(prompt, num_sampled=num_sampled))
    if got[1] == "error":
        assert bed.failed()["remote-blocks"] == before + 1
    else:
        assert got == bed.expected(prompt)
    # The window of the prompt's last token begins in block 4. The prefill's own goes past it.
    assert (got[1] == "error") == (PROMPT + num_sampled - WINDOW > 5 * BLOCK)


# ---------------------------------------------------------------------- vLLM's own groups


def test_how_the_blocks_of_a_group_are_listed(bed: Bed) -> None:
    """By its class alone; a group that keeps states leaves pairing to stock."""
    found = bed.decode.call(
        "evaluate",
        source="""
from dataclasses import asdict, replace
from types import SimpleNamespace
import vllm.v1.kv_cache_interface as specs
from kvpd.vllm.adapter.groups import groups_of
groups = engine.scheduler.kv_cache_config.kv_cache_groups
by_name = {type(g.kv_cache_spec).__name__: g.kv_cache_spec for g in groups}
full, window = by_name["FullAttentionSpec"], by_name["SlidingWindowSpec"]
common = {name: getattr(window, name) for name in ("num_kv_heads", "head_size", "dtype")}
chunks = specs.ChunkedLocalAttentionSpec(block_size=32, attention_chunk_size=64, **common)
ring = specs.CircularBufferSpec(block_size=8, **common)
wrapped = specs.UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": window, "b": window})
mixed = specs.UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": full, "b": ring})
class KpoolTailSpec(specs.SlidingWindowSpec):
    "Stands in for the class of vLLM 0.30 and 0.31."
tail = KpoolTailSpec(block_size=16, sliding_window=16, **common)
result = {}
for name, of in {
    "full": full, "window": window, "chunks": chunks, "noted": replace(full, sliding_window=40),
    "wrapped": wrapped, "ring": ring, "mixed": mixed, "tail": tail,
}.items():
    config = SimpleNamespace(transfer_groups=[SimpleNamespace(kv_cache_spec=of)])
    found = groups_of(config)
    result[name] = None if found is None else [list(asdict(group).values()) for group in found]
""",
    )
    assert found == {
        "full": [[16, False, False]],
        "window": [[16, True, False]],
        "chunks": [[32, False, False]],
        # vLLM without its hybrid manager: layers without a window share these blocks.
        "noted": [[16, False, False]],
        "wrapped": [[16, False, True]],
        "ring": None,
        "mixed": None,
        "tail": None,
    }


def test_no_block_in_front_of_those_ahead_of_the_tokens_is_forgotten(bed: Bed) -> None:
    """Speculative decoding allocates some; stock's cut of a window then loses the first needed."""
    stock, ours = bed.decode.call(
        "evaluate",
        source="""
from types import SimpleNamespace
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock
scheduler = engine.scheduler.connector.connector_scheduler
null = KVCacheBlock(0)
null.is_null = True
# 112 tokens are waited for, a window of 40 begins in block 4, and two blocks are ahead.
window = [null] * 4 + [KVCacheBlock(50 + n) for n in range(4, 9)]
full = [KVCacheBlock(20 + n) for n in range(9)]
groups = engine.scheduler.kv_cache_config.kv_cache_groups
names = [type(group.kv_cache_spec).__name__ for group in groups]
blocks = KVCacheBlocks(tuple(full if n == "FullAttentionSpec" else window for n in names))
index = names.index("SlidingWindowSpec")
ids = blocks.get_unhashed_block_ids_all_groups()
wanted = scheduler._wanted(blocks, 112)
result = [
    scheduler.get_exchange_clipped_blocks(ids)[index],
    [wanted.first_blocks[index], wanted.local_block_ids[index]],
]
""",
    )
    assert stock == [55, 56, 57, 58]
    assert ours == [4, [54, 55, 56, 57, 58]]


def test_blocks_are_not_reported_where_vllm_ends_at_them(bed: Bed) -> None:
    """Full attention in several groups: stock reports blocks; vLLM takes them of one only."""
    found = bed.decode.call(
        "evaluate",
        source="""
worker = engine.connector_worker()
worker._invalid_block_ids.put({7})
result = [sorted(worker.get_block_ids_with_load_errors()), worker._invalid_block_ids.empty()]
""",
    )
    assert found == [[], True]


def test_lists_of_other_groups_have_to_end_in_one_block(bed: Bed) -> None:
    """Where stock pairs latents region by region, from the end."""
    found = bed.decode.call(
        "evaluate",
        source="""
from types import SimpleNamespace
from kvpd.errors import RequestError
from kvpd.vllm.pairing import Wanted
worker = engine.connector_worker()
result = []
for has, wants in ((112, 112), (113, 128), (113, 112), (97, 96)):
    try:
        worker._check_ends(SimpleNamespace(num_tokens=has), Wanted((), (), wants))
        result.append(None)
    except RequestError as error:
        result.append(error.code)
""",
    )
    assert found == [None, None, "remote-tokens", "remote-tokens"]


def test_a_state_is_read_after_its_last_token_only(bed: Bed) -> None:
    """Also where vLLM takes fewer tokens than it was offered (replays, 0.30 and 0.31)."""
    found = bed.decode.call(
        "evaluate",
        source="""
from types import SimpleNamespace
from kvpd.vllm.adapter.scheduler import Asked
from kvpd.vllm.reference import Reference
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock
scheduler = engine.scheduler.connector.connector_scheduler
blocks = KVCacheBlocks(tuple([KVCacheBlock(n) for n in range(1, 8)] for _ in range(3)))
ids = tuple(tuple(range(1, 8)) for _ in range(3))
result = []
scheduler._has_states = True
for taken in (112, 96):
    params = {
        "do_remote_prefill": True, "remote_block_ids": ids, "remote_engine_id": "e",
        "remote_request_id": "r", "remote_host": "h", "remote_port": 1,
    }
    request = SimpleNamespace(request_id="state", kv_transfer_params=params)
    reference = Reference("e", "r", "h", 1, ids, num_tokens=112, tp_size=1)
    scheduler._asked["state"] = Asked(reference)
    scheduler.update_state_after_alloc(request, blocks, taken)
    result.append(scheduler._refused["state"][0].code if "state" in scheduler._refused else None)
    for kept in (scheduler._asked, scheduler._refused, scheduler._reqs_need_recv):
        kept.pop("state", None)
scheduler._has_states = False
""",
    )
    assert found == [None, "remote-tokens"]


# ---------------------------------------------------------------------- parameters

Groups = list[list[int]]
BAD: dict[str, Callable[[Groups], Any]] = {
    "one group's ids past the end": lambda ids: [*ids[:-1], [*ids[-1][:-1], 10**6]],
    "one group's ids repeated": lambda ids: [*ids[:-1], [ids[-1][-1]] * len(ids[-1])],
    "one group's list empty": lambda ids: [*ids[:-1], []],
    "the first group's list empty": lambda ids: [[], *ids[1:]],
    "every list empty": lambda ids: [[] for _ in ids],
    "a group too few": lambda ids: ids[:-1],
    "a group too many": lambda ids: [*ids, [1]],
    "one group's first needed block missing": lambda ids: [*ids[:-1], ids[-1][-2:]],
    "full attention as short as a window": lambda ids: [group[-3:] for group in ids],
    "a window as long as full attention": lambda ids: [[*max(ids, key=len), 900] for _ in ids],
    "null blocks": lambda ids: [[0] * len(group) for group in ids],
    "negative ids": lambda ids: [*ids[:-1], [-1]],
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_ids_of_one_group_end_their_request_only(bed: Bed, name: str) -> None:
    bad, good = bed.prefilled(new_prompt()), bed.prefilled(new_prompt())
    params = bad["kv_transfer_params"]
    params["remote_block_ids"] = BAD[name](params["remote_block_ids"])
    before = sum(bed.failed().values())
    # Together: what the bad one does, it does while the good one is under way.
    done = bed.decode.run([bad, good])
    assert done[bad["id"]]["finish_reason"] == "error"
    assert done[good["id"]]["tokens"] == bed.expected(good["prompt"])[0]
    assert sum(bed.failed().values()) == before + 1


def test_a_failed_request_leaves_nothing_in_the_prefix_cache(bed: Bed) -> None:
    """The same prompt, first with bad ids, then well: nothing of the first counts as computed."""
    prompt = new_prompt()
    bad = bed.prefilled(prompt)
    ids = bad["kv_transfer_params"]["remote_block_ids"]
    bad["kv_transfer_params"]["remote_block_ids"] = [*ids[:-1], []]
    assert bed.tokens(bad)[1] == "error"
    request = bed.prefilled(prompt, [*prompt, 4])
    assert bed.tokens(request) == bed.expected([*prompt, 4])
    again = {"id": f"again-{next(_serial)}", "prompt": [*prompt, 9], "max_tokens": DECODE_TOKENS}
    assert bed.tokens(again) == bed.expected([*prompt, 9])


def test_blocks_that_were_read_serve_other_requests(bed: Bed) -> None:
    """What the decoder keeps of a hand-over is right at every length, of every group."""
    prompt = new_prompt()
    assert bed.tokens(bed.prefilled(prompt)) == bed.expected(prompt)
    for num_tokens in (PROMPT - 1, 6 * BLOCK + 2, 5 * BLOCK + 1, 2 * BLOCK + 1):
        shorter = [*prompt[:num_tokens], 3]
        request = {"id": f"less-{next(_serial)}", "prompt": shorter, "max_tokens": DECODE_TOKENS}
        assert bed.tokens(request) == bed.expected(shorter)


def test_nothing_is_left(bed: Bed) -> None:
    """Runs last: no list grows, and the decoder's blocks are free."""
    source = """
worker = engine.connector_worker()
scheduler = engine.scheduler.connector.connector_scheduler
pool = engine.scheduler.kv_cache_manager.block_pool
result = [
    *worker._leased, *worker._recving_metadata, *worker._recving_transfers, *worker._recv_failures,
    *scheduler._asked, *scheduler._refused, pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
]
result = [item for item in result if item]
"""
    until(lambda: not bed.decode.call("evaluate", source=source))


# ---------------------------------------------------------------------- more engines


def test_what_failed_is_recomputed(model: Path, tmp_path: Path) -> None:
    bed = Bed(model, tmp_path, kv_load_failure_policy="recompute")
    try:
        for name in ("one group's list empty", "null blocks", "every list empty"):
            prompt = new_prompt()
            bed.hit(prompt, 2)
            bad = bed.prefilled(prompt)
            params = bad["kv_transfer_params"]
            params["remote_block_ids"] = BAD[name](params["remote_block_ids"])
            assert bed.tokens(bad) == bed.expected(prompt), name
            assert bed.tokens(bed.prefilled(prompt, [*prompt, 1])) == bed.expected([*prompt, 1])
        assert bed.failed()["remote-blocks"] == 3
    finally:
        bed.close()


# Tokens of the prompt, leading blocks that the decoder has. Stock is right: no token is appended,
# and no window begins with a block.
HAND_OVERS = [(20, 0), (40, 0), (PROMPT, 0), (PROMPT + 5, 0), (PROMPT, 2), (PROMPT, 5), (90, 3)]


def calls_of_decoder(
    model: Path,
    directory: Path,
    transfer: Callable[..., dict[str, Any]],
    hand_overs: Sequence[tuple[int, int]] = HAND_OVERS,
) -> tuple[list[Any], list[list[int]]]:
    """What the decoder asked of NIXL, and the tokens."""
    sides = pair_options(
        model,
        "standard",
        "standard",
        transfer("kv_producer"),
        transfer("kv_consumer"),
        dtype=SHAPE.dtype,
        num_blocks=1024,
    )
    options = sides[0], replace(sides[1], record_nixl=True, enable_prefix_caching=True)
    tokens = []
    with Pair(*options, directory) as pair:
        for index, (num_tokens, num_hit_blocks) in enumerate(hand_overs):
            prompt = seeded(index, num_tokens)
            if num_hit_blocks:
                start = {"prompt": prompt[: num_hit_blocks * BLOCK + 1], "max_tokens": 1}
                pair.decode.run([{"id": f"hit-{next(_serial)}"} | start])
            tokens += list(pair.hand_over([prompt]).tokens.values())
        source = "result = engine.connector_worker().nixl_wrapper.calls"
        calls = pair.decode.call("evaluate", source=source)
    return calls, tokens


def seeded(index: int, num_tokens: int) -> list[int]:
    source = random.Random(500 + index)
    return [source.randrange(VOCABULARY - 1) for _ in range(num_tokens)]


@pytest.mark.parametrize(
    "size",
    [
        pytest.param(SIZE, id="shared-regions"),
        pytest.param(UNEVEN, id="uneven-groups", marks=pytest.mark.slow),
    ],
)
def test_nixl_calls_equal_stock(size: ModelSize, tmp_path: Path) -> None:
    model = build_model(tmp_path, SHAPE, size)
    stock, expected = calls_of_decoder(model, tmp_path, stock_transfer)
    ours, tokens = calls_of_decoder(model, tmp_path, kvpd_transfer)
    assert [call[0] for call in ours] == [call[0] for call in stock]
    assert ours == stock
    assert tokens == expected
    reads = [call for call in stock if call[0] == "make_prepped_xfer"]
    assert len(reads) == len(HAND_OVERS), "the recorder saw no reads; nothing was compared"
    assert tokens_alone(model, tmp_path, HAND_OVERS) == tokens


def tokens_alone(
    model: Path, directory: Path, hand_overs: Sequence[tuple[int, int]]
) -> list[list[int]]:
    """The same prompts' tokens of one engine."""
    options = EngineOptions(model, "standard", dtype=SHAPE.dtype, num_blocks=1024)
    with EngineProcess("alone", options, directory) as alone:
        requests = [
            {"id": str(index), "prompt": seeded(index, count), "max_tokens": DECODE_TOKENS}
            for index, (count, _) in enumerate(hand_overs)
        ]
        done = alone.run(requests)
        return [done[str(index)]["tokens"] for index in range(len(hand_overs))]


@pytest.mark.slow
def test_stock_is_wrong_where_a_window_begins_with_a_block(model: Path, tmp_path: Path) -> None:
    """The last token attends to one more, whose block was given back."""
    hand_overs = [(n * BLOCK + WINDOW - 1, 0) for n in range(1, 7)]
    expected = tokens_alone(model, tmp_path, hand_overs)
    _, stock = calls_of_decoder(model, tmp_path, stock_transfer, hand_overs)
    assert stock != expected
    _, ours = calls_of_decoder(model, tmp_path, kvpd_transfer, hand_overs)
    assert ours == expected


@pytest.mark.slow
def test_groups_with_regions_of_their_own(tmp_path: Path) -> None:
    bed = Bed(build_model(tmp_path, SHAPE, UNEVEN), tmp_path)
    try:
        assert sorted(bed.groups(bed.decode)) == [
            ("FullAttentionSpec", 5),
            ("SlidingWindowSpec", 4),
        ]
        for num_hit_blocks, num_appended in itertools.product((0, 2, 5), (0, 1, BLOCK + 1)):
            prompt = new_prompt()
            longer = prompt + new_prompt()[:num_appended]
            bed.hit(longer, num_hit_blocks)
            assert bed.tokens(bed.prefilled(prompt, longer)) == bed.expected(longer)
        for name in BAD:
            bad, good = bed.prefilled(new_prompt()), bed.prefilled(new_prompt())
            params = bad["kv_transfer_params"]
            params["remote_block_ids"] = BAD[name](params["remote_block_ids"])
            done = bed.decode.run([bad, good])
            assert done[bad["id"]]["finish_reason"] == "error", name
            assert done[good["id"]]["tokens"] == bed.expected(good["prompt"])[0], name
    finally:
        bed.close()
