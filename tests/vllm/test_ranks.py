"""Two tensor-parallel ranks a side: workers in processes of their own, requests proved in each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.client import EngineError, EngineOptions
from tests.vllm.model import ModelShape
from tests.vllm.pair import DECODE_TOKENS, kvpd_transfer, prompts
from tests.vllm.server import Server, cpu_server

SHAPE = ModelShape(kv_heads=2, head_dim=64)
BLOCK = 16
RANKS = ("--tensor-parallel-size", "2")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def servers(
    model_of: Callable[[ModelShape], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Server]]:
    model, directory = model_of(SHAPE), tmp_path_factory.mktemp("ranks")
    sides = {
        "prefill": ("standard", kvpd_transfer("kv_producer")),
        "converted": ("shuffled", kvpd_transfer("kv_consumer", page_format_conversion=True)),
        "identical": ("standard", kvpd_transfer("kv_consumer")),
    }
    found: dict[str, Server] = {}
    try:
        for name, (backend, transfer) in sides.items():
            place = directory / name
            place.mkdir()
            options = EngineOptions(model, backend, transfer=transfer)
            found[name] = cpu_server(name, options, place, RANKS)
        for server in found.values():
            server.wait()
        yield found
    finally:
        for server in found.values():
            server.close()


def prefilled(server: Server, prompt: list[int]) -> dict[str, Any]:
    answer = server.generate(prompt, 1, {"do_remote_decode": True, "do_remote_prefill": False})
    params: dict[str, Any] = answer["kv_transfer_params"]
    assert params["tp_size"] == 2
    return params


@pytest.mark.parametrize("mode", ["converted", "identical"])
def test_tokens_are_right_and_bad_requests_fail_alone(
    servers: dict[str, Server], mode: str
) -> None:
    decoder = servers[mode]
    batch = prompts(4, blocks=3, block_size=BLOCK, seed=77 if mode == "converted" else 78)
    params = [prefilled(servers["prefill"], prompt) for prompt in batch]
    longer = [*batch[0], 5, 6]
    # By two ranks as well: their sums are rounded otherwise than those of one.
    alone = servers["prefill"].generate(longer, DECODE_TOKENS)
    # The first handshake is asked for by a request that names one rank, the second by a good one.
    for prompt, wrong in (
        (batch[1], params[1] | {"tp_size": 1}),
        (longer, params[2]),
        (batch[3], params[3] | {"remote_block_ids": [[1, 2, 3, 10**6]]}),
    ):
        with pytest.raises(EngineError, match="HTTP Error 500"):
            decoder.generate(prompt, DECODE_TOKENS, wrong)
    answer = decoder.generate(longer, DECODE_TOKENS, params[0])
    assert answer["choices"][0]["token_ids"] == alone["choices"][0]["token_ids"]
