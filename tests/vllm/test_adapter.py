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
    [
        (["LBHNC", "LHBNC"], "LHBNC"),
        (["LHBNC", "LBHNC"], "LHBNC"),
        (["LBHNC"], "LBHNC"),
        # Any layout.
        (None, "LHBNC"),
    ],
)
def test_shuffled_pages_lie_in_one_piece_however_their_backend_lists_layouts(
    engine: EngineProcess, listed: list[str] | None, asked_for: str
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
    @staticmethod
    def supported_kv_cache_layouts():
        listed = {listed!r}
        return None if listed is None else tuple(KVCacheLayout[name] for name in listed)
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


@pytest.mark.parametrize("refusal", ["ValueError", "NotImplementedError", "ImportError"])
def test_an_engine_core_without_layers_keeps_the_preference_of_stock(
    engine: EngineProcess, refusal: str
) -> None:
    """With workers in other processes stock selects by the model alone, which may be nobody's."""
    found = engine.call(
        "evaluate",
        source=f"""
from kvpd.vllm import KvpdConnector
from kvpd.vllm.adapter import description
def select(config):
    raise {refusal}("no valid attention backend")
kept = description.get_current_attn_backends
description.get_current_attn_backends = select
try:
    config = engine.engine.vllm_config
    result = [description.own_layout(config), KvpdConnector.get_required_kvcache_layout(config)]
finally:
    description.get_current_attn_backends = kept
""",
    )
    assert found == [None, "LBHNC"]


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
    def refuse(*arguments):
        raise NotImplementedError("FP8 on a CPU without AVX-512")
    cpu_attn._get_attn_isa = refuse
    tiles.add(opaque(description._layer_cache(worker, [name], backend, 4096)).digest)
    cpu_attn._get_attn_isa = isa
    result.append(len(tiles))
finally:
    description.current_platform = kept
    worker._layer_specs[name] = plain
""",
    )
    assert found == [1, 4, 3]


def test_draft_models_are_published_shortly_and_told_apart(engine: EngineProcess) -> None:
    found = engine.call(
        "evaluate",
        source="""
from types import SimpleNamespace
from kvpd.vllm.adapter import model_facts
kept = model_facts._get_speculative_compatibility_factors, model_facts._weights
# A draft model is not at hand: its settings are stood in for, the rest is the engine's.
config = SimpleNamespace(
    speculative_config=SimpleNamespace(draft_model_config=worker.model_config),
    load_config=worker.vllm_config.load_config,
)
factors = {"method": "eagle3", "model": "/models/" + 300 * "x" + "/EAGLE3-8B", "revision": None}
names = ({}, {"revision": 40 * "a"}, {"model": "/models/" + 300 * "y" + "/EAGLE3-8B"})
result = [[], []]
for changes in (*names, {"method": "eagle"}):
    model_facts._get_speculative_compatibility_factors = lambda config: factors | changes
    result[0].append(model_facts.speculative(config))
    model_facts._weights = lambda *arguments: 1 / 0
    result[1].append(model_facts.speculative(config))
    model_facts._weights = kept[1]
model_facts._get_speculative_compatibility_factors, model_facts._weights = kept
""".replace("worker.", "engine.connector_worker()."),
    )
    known, unknown = found
    # Its weights are sampled as the model's are; where they cannot be, its name counts.
    assert len(set(known[:3])) == 1 and len(set(known)) == 2
    assert all(text.startswith("eagle") and " draft weights " in text for text in known)
    assert len(set(unknown)) == 4
    for text in (*known, *unknown):
        assert text.startswith("eagle") and len(text) < 128
    assert all("EAGLE3-8B" in text for text in unknown)


def test_what_was_loaded_is_published(engine: EngineProcess) -> None:
    facts = engine.call(
        "evaluate",
        source="""
from kvpd.vllm.adapter.description import describe
worker = engine.connector_worker()
layers = engine.runner.compilation_config.static_forward_context
caches = {name: layer.kv_cache for name, layer in layers.items() if hasattr(layer, "kv_cache")}
facts = describe(worker, caches).facts
names = ("model_config", "model_weights", "quantization", "cache_dtype", "cache_dtype_setting",
    "quantised_cache", "scales", "speculative", "hybrid_manager", "pp_size")
result = {name: getattr(facts, name) for name in names}
""",
    )
    config = facts.pop("model_config")
    assert len(facts.pop("model_weights")) == 32
    assert facts.pop("hybrid_manager") in (True, False)
    assert facts == {
        "quantization": "none",
        "cache_dtype": "bfloat16",
        "cache_dtype_setting": "auto",
        "quantised_cache": False,
        "scales": None,
        "speculative": "none",
        "pp_size": 1,
    }
    # As tests/vllm/model.py writes them.
    assert config["architectures"] == '["Qwen3ForCausalLM"]'
    assert (config["hidden_size"], config["head_dim"]) == ("256", "64")
    assert (config["rope"], config["rms_norm_eps"]) == ('{"rope_theta":10000}', "1e-06")


def test_an_engine_whose_model_cannot_be_told_says_so_and_starts(engine: EngineProcess) -> None:
    found = engine.call(
        "evaluate",
        source="""
from copy import copy
from kvpd.vllm.adapter.model_facts import model_facts
config = copy(engine.engine.vllm_config)
result = []
for change in ("dummy", None):
    config.load_config = copy(engine.engine.vllm_config.load_config)
    config.load_config.load_format = change
    facts = model_facts(config)
    result.append([facts["model_weights"], facts["model_config"] is None])
config.load_config = engine.engine.vllm_config.load_config
config.model_config = copy(config.model_config)
config.model_config.hf_text_config = None
facts = model_facts(config)
result.append([facts["model_weights"] is None, facts["model_config"]])
""",
    )
    assert found == [[None, False], [None, False], [False, None]]
    assert "the weights cannot be told to peers: KvpdError: load format 'dummy'" in engine.log
    assert "the configuration cannot be told to peers: AttributeError" in engine.log


def test_quantisation_is_the_checkpoints_word(engine: EngineProcess) -> None:
    """vLLM's own name of one method depends on the kernels of the GPU."""
    found = engine.call(
        "evaluate",
        source="""
from enum import Enum
from types import SimpleNamespace
from kvpd.vllm.adapter.model_facts import _quantization
Method = Enum("Method", {"FP8": "fp8"})
def named(vllms, **config):
    return _quantization(SimpleNamespace(quantization=vllms, hf_config=SimpleNamespace(**config)))
awq = {"quant_method": "awq", "bits": 4}
result = [
    named("awq", quantization_config=awq), named("awq_marlin", quantization_config=awq),
    named("compressed-tensors", compression_config={"quant_method": "compressed-tensors"}),
    named("fp8", quantization_config=SimpleNamespace(quant_method=Method.FP8)),
    named("fp8"), named(None), named(None, quantization_config=None),
]
""",
    )
    assert found == ["awq", "awq", "compressed-tensors", "fp8", "fp8", "none", "none"]


def test_element_types_are_resolved(engine: EngineProcess) -> None:
    found = engine.call(
        "evaluate",
        source="""
from copy import copy
from types import SimpleNamespace
import torch
from kvpd.vllm.adapter import model_facts
config = copy(engine.engine.vllm_config)
def element(setting, quantization=None, fp8=torch.float8_e4m3fn):
    config.cache_config = SimpleNamespace(cache_dtype=setting)
    config.model_config = copy(engine.engine.vllm_config.model_config)
    config.model_config.hf_config = SimpleNamespace(quantization_config=quantization)
    model_facts.current_platform = SimpleNamespace(fp8_dtype=lambda: fp8)
    return model_facts.cache_element(config)
kept = model_facts.current_platform
modelopt = {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}
try:
    result = [
        *map(element, ("auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2", "nvfp4")),
        element("fp8", fp8=torch.float8_e4m3fnuz),
        element("auto", modelopt),
    ]
finally:
    model_facts.current_platform = kept
""",
    )
    fn, e5m2 = "float8_e4m3fn", "float8_e5m2"
    plain = ["bfloat16", "bfloat16", "float16"]
    assert found == [*plain, fn, fn, e5m2, "nvfp4", "float8_e4m3fnuz", fn]


def test_scales_of_a_quantised_cache(engine: EngineProcess) -> None:
    """On vLLM's attention layers; only the quantisation of their specs is made up."""
    found = engine.call(
        "evaluate",
        source="""
from dataclasses import replace
from vllm.v1.kv_cache_interface import KVQuantMode
from kvpd.vllm.adapter.model_facts import scale_facts
worker = engine.connector_worker()
layers = engine.runner.compilation_config.static_forward_context
plain = worker._layer_specs
specs = {name: replace(spec, kv_quant_mode=KVQuantMode.FP8_PER_TENSOR)
    for name, spec in plain.items()}
(first, second, *_) = specs
layer = layers[second]
kept = layer._k_scale, layer._k_scale_float, layer._v_scale
try:
    result = [scale_facts(plain, layers), scale_facts(specs, layers)]
    layer._k_scale, layer._k_scale_float = torch.tensor(0.1), torch.tensor(0.1).item()
    layer._v_scale = torch.tensor([0.5, 2.0])
    result.append(scale_facts(specs, layers)["scales"][1][1:])
    for bad in (float("nan"), float("inf"), 0.0, -1.0):
        layer._k_scale, layer._k_scale_float = torch.tensor(bad), bad
        result.append(scale_facts(specs, layers))
    # Kernels that read the one and kernels that read the other would disagree.
    layer._k_scale, layer._k_scale_float = torch.tensor(1.0), 2.0
    result.append(scale_facts(specs, layers))
    result.append(scale_facts({first: plain[first], second: specs[second]}, {second: object()}))
finally:
    layer._k_scale, layer._k_scale_float, layer._v_scale = kept
result.append([first, second])
""",
    )
    plain, quantised, changed, *unknown, without, (_, second) = found
    assert plain == {"quantised_cache": False}
    assert [scales[1:] for scales in quantised["scales"]] == [[[1.0], [1.0]]] * 3
    assert quantised["scales"][1][0] == second
    # 0.1 as the float32 that it is, not as it was written.
    assert changed == [[0.10000000149011612], [0.5, 2.0]]
    assert unknown == [{"quantised_cache": True, "scales": None}] * 5
    assert without == {"quantised_cache": True, "scales": []}
