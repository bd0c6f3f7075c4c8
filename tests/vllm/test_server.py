"""A real decode server: requests over HTTP, and what its `/metrics` then says.

Its backend is installed as a user's own would be, by a plugin's entry point. The prefills are
engines of the test bed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.vllm.checks import Colocated
from tests.vllm.client import EngineError, EngineOptions, EngineProcess
from tests.vllm.model import LAYERS, ModelShape
from tests.vllm.pair import DECODE_TOKENS, kvpd_transfer, prefill, prompts, stock_transfer
from tests.vllm.server import Server, cpu_server

SHAPE = ModelShape(kv_heads=2, head_dim=64)
BLOCK = 16
pytestmark = pytest.mark.core
PAGE_BYTES = 2 * SHAPE.kv_heads * BLOCK * SHAPE.head_dim * 2


@pytest.fixture(scope="module")
def decoder(
    model_of: Callable[[ModelShape], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    transfer = kvpd_transfer("kv_consumer", page_format_conversion=True)
    options = EngineOptions(model_of(SHAPE), "shuffled", transfer=transfer)
    with cpu_server("decode", options, tmp_path_factory.mktemp("server")) as server:
        yield server


def test_metrics_of_a_real_server(
    decoder: Server,
    model_of: Callable[[ModelShape], Path],
    colocated: Colocated,
    tmp_path: Path,
) -> None:
    batch = prompts(2, blocks=3, block_size=BLOCK, seed=101)
    expected = colocated(SHAPE, BLOCK, batch)
    before = decoder.metrics()
    for name in ("pages_converted_total", "bytes_converted_total", "convert_seconds_count"):
        assert before[f"vllm:kvpd_{name}"] == 0
    options = EngineOptions(model_of(SHAPE), "standard", transfer=kvpd_transfer("kv_producer"))
    with EngineProcess("prefill", options, tmp_path) as engine:
        answers = [
            decoder.generate(request["prompt"], DECODE_TOKENS, request["kv_transfer_params"])
            for request in prefill(engine, batch)
        ]
    assert [answer["choices"][0]["token_ids"] for answer in answers] == expected
    after = decoder.metrics_with("vllm:kvpd_convert_seconds_count", 2)
    assert after["vllm:kvpd_pages_converted_total"] == 8
    assert after["vllm:kvpd_bytes_converted_total"] == 8 * PAGE_BYTES * LAYERS
    for name in ("read", "convert", "queued"):
        assert after[f"vllm:kvpd_{name}_seconds_count"] == 2
    assert after["vllm:kvpd_read_seconds_sum"] > 0
    assert after["vllm:kvpd_convert_seconds_sum"] > 0
    # Stock's own count of the same reads.
    assert after["vllm:nixl_bytes_transferred_count"] == 2
    assert after["vllm:nixl_bytes_transferred_sum"] == 8 * PAGE_BYTES * LAYERS
    assert after["vllm:nixl_num_failed_transfers_total"] == 0
    assert not [name for name in after if name.startswith("vllm:kvpd_refusals_total ")]


def test_refusals_show_with_their_reason(
    decoder: Server, model_of: Callable[[ModelShape], Path], tmp_path: Path
) -> None:
    """A stock prefill: untagged, and the decoder's pages are not what stock assumes."""
    options = EngineOptions(model_of(SHAPE), "standard", transfer=stock_transfer("kv_producer"))
    with EngineProcess("stock", options, tmp_path) as stock:
        (request,) = prefill(stock, prompts(1, blocks=3, block_size=BLOCK, seed=102))
        converted = decoder.metrics()["vllm:kvpd_pages_converted_total"]
        with pytest.raises(EngineError) as caught:
            decoder.generate(request["prompt"], DECODE_TOKENS, request["kv_transfer_params"])
        assert "HTTP Error 500" in str(caught.value)
    refused = "vllm:kvpd_refusals_total reason=untagged-peer"
    after = decoder.metrics_with(refused, 1)
    assert after.get(refused) == 1, decoder.log[-6000:]
    assert after["vllm:kvpd_pages_converted_total"] == converted
