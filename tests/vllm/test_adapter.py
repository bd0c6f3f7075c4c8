"""Seams of the adapter that a hand-over does not show, on vLLM's real classes in one engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.vllm.client import EngineOptions, EngineProcess
from tests.vllm.model import ModelShape
from tests.vllm.pair import kvpd_transfer, prefill, prompts

SHAPE = ModelShape(kv_heads=2, head_dim=64)
pytestmark = pytest.mark.core


@pytest.fixture(scope="module")
def engine(
    model_of: Callable[[ModelShape], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineProcess]:
    transfer = kvpd_transfer("kv_producer", bidirectional_kv_xfer=True)
    options = EngineOptions(model_of(SHAPE), "standard", transfer=transfer)
    with EngineProcess("adapter", options, tmp_path_factory.mktemp("adapter")) as engine:
        yield engine


def test_engines_that_share_a_context_are_refused(engine: EngineProcess) -> None:
    """Under any other name than NixlConnector vLLM itself would let them start."""
    refused = engine.call(
        "evaluate",
        source="""
from copy import copy
from kvpd.errors import KvpdError
from kvpd.vllm import KvpdConnector
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
result = []
for role in KVConnectorRole:
    for field in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        config = copy(engine.engine.vllm_config)
        config.parallel_config = copy(config.parallel_config)
        setattr(config.parallel_config, field, 2)
        try:
            KvpdConnector(config, role, None)
        except KvpdError as error:
            result.append([error.code, error.field, error.got])
""",
    )
    fields = ("decode_context_parallel_size", "prefill_context_parallel_size")
    assert refused == [["invalid-config", field, "2"] for _ in range(2) for field in fields]


def test_no_fixed_expiry_is_published_where_stock_would_decline_by_it(
    engine: EngineProcess,
) -> None:
    """With bidirectional transfers stock refuses what expires soon, whatever was renewed."""
    (request,) = prefill(engine, prompts(1, blocks=3, block_size=16, seed=7))
    assert request["kv_transfer_params"]["remote_block_ids"]
    assert request["kv_transfer_params"].get("remote_blocks_expiry_time") is None


def test_handshakes_find_every_list_while_the_stats_are_emptied(engine: EngineProcess) -> None:
    """A handshake's thread may count at any moment; a missing list would fail the handshake."""
    assigned = engine.call(
        "evaluate",
        source="""
from kvpd.vllm.adapter.stats import KvpdStats
result = []
class Watched(KvpdStats):
    def __setattr__(self, name, value):
        if name == "data":
            result.append(sorted(value))
        super().__setattr__(name, value)
Watched().clone_and_reset()
""",
    )
    assert len(assigned) > 1
    for lists in assigned[1:]:
        assert {"kvpd_refusals", "kvpd_untagged_peers", "num_failed_transfers"} <= set(lists)


@pytest.mark.parametrize(
    ("listed", "asked_for"),
    [(["LBHNC", "LHBNC"], "LHBNC"), (["LHBNC", "LBHNC"], "LHBNC"), (["LBHNC"], "LBHNC")],
)
def test_shuffled_pages_lie_in_one_piece_however_their_backend_lists_layouts(
    engine: EngineProcess, listed: list[str], asked_for: str
) -> None:
    """AITER FA of vLLM 0.30 and 0.31 lists LBHNC first, where K and V of a block lie apart."""
    found = engine.call(
        "evaluate",
        source=f"""
from kvpd.vllm.adapter import description
from kvpd.vllm.formats import AITER_FA
from vllm.v1.kv_cache_layout import KVCacheLayout
class Backend:
    full_cls_name = staticmethod(lambda: tuple(AITER_FA.rsplit(".", 1)))
    supported_kv_cache_layouts = staticmethod(lambda: [KVCacheLayout[n] for n in {listed!r}])
kept = description.get_current_attn_backends, description._is_shuffled
description.get_current_attn_backends = lambda config: [Backend]
description._is_shuffled = lambda backend: True
try:
    result = description.own_layout(engine.engine.vllm_config)
finally:
    description.get_current_attn_backends, description._is_shuffled = kept
""",
    )
    assert found == asked_for


@pytest.mark.parametrize(
    ("extra", "as_stock"),
    [({}, True), ({"slab_bytes": 1 << 20}, False), ({"direct_transfer": True}, False)],
)
def test_memory_of_ours_does_not_sleep(
    engine: EngineProcess, extra: dict[str, object], as_stock: bool
) -> None:
    supported = engine.call(
        "evaluate",
        source=f"""
from kvpd.vllm import KvpdConnector
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector
config = KVTransferConfig(
    kv_connector="KvpdConnector", kv_role="kv_both", kv_connector_extra_config={extra!r}
)
# Stock says so itself from 0.33 on.
NixlPullConnector.supports_sleep_mode = classmethod(lambda cls, config: True)
result = KvpdConnector.supports_sleep_mode(config)
del NixlPullConnector.supports_sleep_mode
""",
    )
    assert supported is as_stock
