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
    [
        ({}, True),
        # Whether there is a slab is then decided when caches are registered: none that can sleep.
        ({"page_format_conversion": True}, True),
        ({"page_format_conversion": True, "slab_bytes": 0}, True),
        ({"page_format_conversion": True, "slab_bytes": 1 << 20}, False),
        ({"slab_bytes": 1 << 20}, True),
        ({"direct_transfer": True}, False),
    ],
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


def test_the_default_slab_is_what_the_engines_configuration_leaves(engine: EngineProcess) -> None:
    """On vLLM's own configuration; the GPU's memory is told, as there is none here."""
    found = engine.call(
        "evaluate",
        source="""
from copy import copy
from kvpd.vllm.adapter import memory
from kvpd.vllm.config import ConnectorConfig
GIB = 1 << 30
description = engine.connector_worker()._link._local.description
kept = torch.cuda.mem_get_info, torch.cuda.memory_reserved
torch.cuda.mem_get_info = lambda device: (17 * GIB, 140 * GIB)
torch.cuda.memory_reserved = lambda device: 110 * GIB

def slab(device="cuda", role="kv_both", keys={"page_format_conversion": True}, **changes):
    config = copy(engine.engine.vllm_config)
    for name in ("kv_transfer_config", "model_config", "cache_config"):
        setattr(config, name, copy(getattr(config, name)))
    config.kv_transfer_config.kv_role = role
    config.cache_config.gpu_memory_utilization = 0.9
    config.cache_config.kv_cache_memory_bytes = changes.get("cache_bytes")
    config.model_config.enable_sleep_mode = changes.get("sleeps", False)
    of = ConnectorConfig.of(keys)
    return memory.default_slab_bytes(config, of, description, torch.device(device)) >> 20

try:
    result = {
        "reader": slab(), "consumer": slab(role="kv_consumer"), "sized": slab(cache_bytes=GIB),
        "producer": slab(role="kv_producer"), "host": slab("cpu"), "sleeps": slab(sleeps=True),
        "not converting": slab(keys={}), "given": slab(keys={"slab_bytes": 0}),
    }
finally:
    torch.cuda.mem_get_info, torch.cuda.memory_reserved = kept
""",
    )
    slabs = {"reader": 256, "consumer": 256, "sized": 512}
    nothing = ("producer", "host", "sleeps", "not converting", "given")
    assert found == slabs | dict.fromkeys(nothing, 0)


def test_statistics_pass_through_a_multi_connector(engine: EngineProcess) -> None:
    """Its API server rebuilds them by the name of the child's class; what it cannot ends it."""
    found = engine.call(
        "evaluate",
        source="""
import msgspec
from kvpd.vllm import KvpdConnector
from kvpd.vllm.adapter.stats import KvpdStats
from vllm.distributed.kv_transfer.kv_connector.v1 import multi_connector
stats = KvpdStats()
stats.record_untagged_peer()
sent = multi_connector.MultiKVConnectorStats()
sent[KvpdConnector.__name__] = stats
payload = msgspec.msgpack.decode(msgspec.msgpack.encode(sent.to_dict()))
came = multi_connector.MultiConnector.build_kv_connector_stats(payload)[KvpdConnector.__name__]
result = [type(came).__name__, came.data == stats.data]
""",
    )
    assert found == ["KvpdStats", True]


def test_what_the_hardware_decides_is_part_of_an_opaque_page(engine: EngineProcess) -> None:
    """Equal specs of quantised pages hold other floats on MI300X than on H200 or MI355X."""
    found = engine.call(
        "evaluate",
        source="""
from dataclasses import replace
from types import SimpleNamespace
import torch
from kvpd.vllm.adapter import description
from kvpd.vllm.formats import opaque
worker = engine.connector_worker()
(name, *_) = worker._layer_specs
plain = worker._layer_specs[name]
quantised = replace(plain, dtype=torch.uint8)
backend = worker.attn_backends[0]
def format_on(spec, device, fp8, capability):
    description.current_platform = SimpleNamespace(
        is_cpu=lambda: False,
        device_name=device,
        fp8_dtype=lambda: fp8,
        get_device_capability=lambda: capability,
    )
    worker._layer_specs[name] = spec
    return opaque(description._layer_cache(worker, [name], backend, 4096)).digest
kept = description.current_platform
machines = [
    ("cuda", torch.float8_e4m3fn, (9, 0)),
    ("cuda", torch.float8_e4m3fn, (10, 0)),
    ("rocm", torch.float8_e4m3fnuz, (9, 4)),
    ("rocm", torch.float8_e4m3fn, (9, 5)),
]
try:
    result = [
        len({format_on(spec, *machine) for machine in machines}) for spec in (plain, quantised)
    ]
    description.current_platform = kept
    worker._layer_specs[name] = plain
    from vllm.v1.attention.backends import cpu_attn
    isa = cpu_attn._get_attn_isa
    tiles = set()
    for value in ("amx", "vec"):
        cpu_attn._get_attn_isa = lambda *arguments: value
        tiles.add(opaque(description._layer_cache(worker, [name], backend, 4096)).digest)
    cpu_attn._get_attn_isa = isa
    result.append(len(tiles))
finally:
    description.current_platform = kept
    worker._layer_specs[name] = plain
""",
    )
    assert found == [1, 4, 2]


def test_draft_models_are_published_shortly_and_told_apart(engine: EngineProcess) -> None:
    found = engine.call(
        "evaluate",
        source="""
from kvpd.vllm.adapter import description
kept = description._get_speculative_compatibility_factors
factors = {"method": "eagle3", "model": "/models/" + 300 * "x" + "/EAGLE3-8B", "revision": None}
result = []
for changes in ({}, {"revision": 40 * "a"}, {"model": "/models/" + 300 * "y" + "/EAGLE3-8B"}):
    description._get_speculative_compatibility_factors = lambda config: factors | changes
    result.append(description._speculative(None))
description._get_speculative_compatibility_factors = kept
""",
    )
    assert len(set(found)) == 3
    for text in found:
        assert text.startswith("eagle3 ") and "EAGLE3-8B" in text and len(text) < 128
