"""A prefill engine and a decode engine in two processes, and one hand-over between them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from tests.vllm.client import EngineOptions, EngineProcess
from tests.vllm.model import VOCABULARY

DECODE_TOKENS = 8


def stock_transfer(role: str, **extra: Any) -> dict[str, Any]:
    """vLLM's own connector."""
    return _transfer("NixlConnector", role, None, extra)


def kvpd_transfer(role: str, **extra: Any) -> dict[str, Any]:
    """kvpd's connector."""
    return _transfer("KvpdConnector", role, "kvpd.vllm", extra)


def _transfer(name: str, role: str, module: str | None, extra: dict[str, Any]) -> dict[str, Any]:
    top_level: dict[str, Any] = {
        key: extra.pop(key)
        for key in ("kv_load_failure_policy", "enable_permute_local_kv", "kv_buffer_device")
        if key in extra
    }
    # A loaded machine must not turn into an expired lease; tests of leases set their own.
    extra.setdefault("kv_lease_duration", 300)
    transfer: dict[str, Any] = {
        "kv_connector": name,
        "kv_role": role,
        "kv_buffer_device": "cpu",
        "kv_connector_extra_config": extra,
        **top_level,
    }
    if module is not None:
        transfer["kv_connector_module_path"] = module
    return transfer


def prompts(count: int, *, blocks: int, block_size: int, seed: int = 0) -> list[list[int]]:
    """Random prompts that fill `blocks` blocks and reach 1, 2, ... tokens into one more."""
    source = random.Random(seed)
    return [
        [source.randrange(VOCABULARY - 1) for _ in range(blocks * block_size + 1 + index)]
        for index in range(count)
    ]


@dataclass
class HandOver:
    """What came out of one hand-over; keys are request ids."""

    tokens: dict[str, list[int]]
    finish_reasons: dict[str, str]
    remote_blocks: dict[str, list[int]]
    local_blocks: dict[str, list[int]] = field(default_factory=dict)
    received_pages: dict[str, NDArray[np.uint8]] = field(default_factory=dict)
    requested_blocks: dict[str, list[int]] = field(default_factory=dict)

    def num_hit_blocks(self, name: str) -> int:
        """Leading blocks that the decoder had already and did not ask for."""
        return len(self.local_blocks[name]) - len(self.requested_blocks[name])


_serial = itertools.count()


def prefill(
    engine: EngineProcess, batch: Sequence[Sequence[int]], max_tokens: int = DECODE_TOKENS
) -> list[dict[str, Any]]:
    """Prefill prompts at once; the decode requests that continue them."""
    requests: list[dict[str, Any]] = [
        {
            "id": f"request-{next(_serial)}",
            "prompt": list(prompt),
            "max_tokens": 1,
            "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False},
        }
        for prompt in batch
    ]
    done = engine.run(requests)
    for request in requests:
        request["max_tokens"] = max_tokens
        request["kv_transfer_params"] = done[request["id"]]["kv_transfer_params"]
    return requests


def decode(engine: EngineProcess, requests: Sequence[dict[str, Any]], directory: Path) -> HandOver:
    """Decode prefilled requests at once."""
    engine.call("snapshot_received", directory=str(directory))
    done = engine.run(requests)
    result = HandOver(
        tokens={name: entry["tokens"] for name, entry in done.items()},
        finish_reasons={name: entry["finish_reason"] for name, entry in done.items()},
        remote_blocks={
            request["id"]: request["kv_transfer_params"]["remote_block_ids"][0]
            for request in requests
        },
    )
    received = engine.call("results")["received"]
    for request in requests:
        for internal, entry in received.items():
            # vLLM appends a random suffix to the id it was given.
            if internal == request["id"] or internal.startswith(request["id"] + "-"):
                result.local_blocks[request["id"]] = entry["blocks"][0]
                result.requested_blocks[request["id"]] = entry["requested"]
                result.received_pages[request["id"]] = np.load(entry["pages"])
    return result


class Pair:
    """Two engines. `hand_over` prefills on one, decodes on the other."""

    def __init__(self, prefill: EngineOptions, decode: EngineOptions, directory: Path) -> None:
        self.directory = directory
        self._stack = ExitStack()
        # Both start at once; each constructor only spawns.
        self.prefill = self._stack.enter_context(EngineProcess("prefill", prefill, directory))
        self.decode = self._stack.enter_context(EngineProcess("decode", decode, directory))

    def prefill_only(
        self, batch: Sequence[Sequence[int]], max_tokens: int = DECODE_TOKENS
    ) -> list[dict[str, Any]]:
        return prefill(self.prefill, batch, max_tokens)

    def decode_only(self, requests: Sequence[dict[str, Any]]) -> HandOver:
        return decode(self.decode, requests, self.directory)

    def hand_over(self, batch: Sequence[Sequence[int]]) -> HandOver:
        return self.decode_only(self.prefill_only(batch))

    def __enter__(self) -> Self:
        _ = self.prefill.facts, self.decode.facts
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End both engines."""
        self._stack.close()


def pair_options(
    model: Path,
    prefill_backend: str,
    decode_backend: str,
    prefill_transfer: dict[str, Any],
    decode_transfer: dict[str, Any],
    **common: Any,
) -> tuple[EngineOptions, EngineOptions]:
    """Options of both engines, equal except for backend and connector."""
    base = EngineOptions(model, prefill_backend, transfer=prefill_transfer, **common)
    return base, replace(base, backend=decode_backend, transfer=decode_transfer)
