"""1P1D with shuffled pages on the decoder only: tokens equal one engine's that does both.

Three vLLM servers: a reference that prefills and decodes by itself, a prefill, and a decoder; the
reference and the decoder have AITER FA and the shuffle switch, the prefill has the switch off.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.amd.parts import ACCURACY, TAIL_CHARACTERS, Part
from tests.vllm.client import ROOT, EngineError, EngineOptions, free_port
from tests.vllm.model import ModelShape, build_model
from tests.vllm.pair import kvpd_transfer, prompts
from tests.vllm.server import Server, cpu_server

PROMPTS = 8
TOKENS = 32
BLOCKS = 12
SHAPE = ModelShape(kv_heads=8, head_dim=128)
CPU_SHAPE = ModelShape(kv_heads=2, head_dim=64)
AITER = {"VLLM_ROCM_USE_AITER": "1", "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT": "0"}
SHUFFLE = {"VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT": "1"}
ROLES: dict[str, dict[str, Any] | None] = {
    "reference": None,
    "prefill": kvpd_transfer("kv_producer", kv_lease_duration=300),
    "decode": kvpd_transfer("kv_consumer", page_format_conversion=True, kv_lease_duration=300),
}


@dataclass(frozen=True)
class Machine:
    """Where the servers run.

    Attributes:
        model: path or name; None for the tiny one.
        num_gpus: prefill and decode share the only one, or have one each.
        is_cpu_bed: test backends on CPUs in place of AITER on GPUs.
    """

    model: str | None
    block_size: int
    num_gpus: int
    is_cpu_bed: bool = False


def accuracy(machine: Machine, directory: Path) -> Part:
    """Run the three servers and compare their tokens."""
    batch = prompts(PROMPTS, blocks=BLOCKS, block_size=machine.block_size)
    commands: dict[str, Any] = {}
    details: dict[str, Any] = {
        "commands": commands,
        "model": machine.model or "tiny Qwen3, random seeded weights",
        "stands_in": "CPU test backends in place of AITER" if machine.is_cpu_bed else "",
    }
    servers: dict[str, Server] = {}
    try:
        start = _starter(machine, directory, commands, servers)
        with start("reference") as reference:
            expected = [_tokens(reference.generate(prompt, TOKENS)) for prompt in batch]
        with ExitStack() as stack:
            # One after the other: each takes its share of the memory that is free when it starts.
            prefill, decode = (stack.enter_context(start(name)) for name in ("prefill", "decode"))
            got = []
            for prompt in batch:
                asked = {"do_remote_decode": True, "do_remote_prefill": False}
                params = prefill.generate(prompt, 1, asked)["kv_transfer_params"]
                got.append(_tokens(decode.generate(prompt, TOKENS, params)))
            details["metrics"] = decode.metrics()
    except (EngineError, OSError) as error:
        details["logs"] = {name: server.log[-TAIL_CHARACTERS:] for name, server in servers.items()}
        return Part(ACCURACY, "failed", str(error).partition("\n")[0], details)
    details["logs"] = {name: _said(server.log) for name, server in servers.items()}
    details["tokens"] = {"expected": expected, "got": got}
    return _judged(expected, got, details)


def _judged(
    expected: Sequence[Sequence[int]], got: Sequence[Sequence[int]], details: dict[str, Any]
) -> Part:
    """Right tokens show nothing if the decoder computed them itself or converted nothing."""
    equal = sum(a == b for a, b in zip(expected, got, strict=True))
    details["equal_answers"] = f"{equal} of {len(expected)}"
    converted = details["metrics"].get("vllm:kvpd_pages_converted_total", 0)
    wanted = PROMPTS * (BLOCKS + 1)
    if converted != wanted:
        why = f"{converted:.0f} pages were converted, {wanted} expected: is the switch on?"
        return Part(ACCURACY, "failed", why, details)
    if equal != len(expected):
        return Part(ACCURACY, "failed", f"{len(expected) - equal} answers differ", details)
    return Part(ACCURACY, "passed", "", details)


def _starter(
    machine: Machine,
    directory: Path,
    commands: dict[str, Any],
    servers: dict[str, Server],
) -> Callable[[str], Server]:
    """Starts a role's server, and notes its command in full."""

    def start(role: str) -> Server:
        server = (_cpu_server if machine.is_cpu_bed else _server)(machine, role, directory)
        commands[role] = {"environment": dict(server.environment), "arguments": server.arguments}
        servers[role] = server
        return server

    return start


def _server(machine: Machine, role: str, directory: Path) -> Server:
    model = machine.model or str(build_model(directory, SHAPE))
    shares_gpu = role != "reference" and machine.num_gpus < 2
    environment = AITER | ({} if role == "prefill" else SHUFFLE)
    environment |= {
        "HIP_VISIBLE_DEVICES": "1" if role == "decode" and machine.num_gpus > 1 else "0",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
        "PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH", ""), str(ROOT)])),
    }
    arguments = [
        *("--model", model),
        *("--dtype", "bfloat16"),
        *("--seed", "0"),
        *("--block-size", str(machine.block_size)),
        *("--max-model-len", "2048"),
        *("--gpu-memory-utilization", "0.4" if shares_gpu else "0.8"),
        # Without a connector vLLM's first choice is another one, whose pages differ.
        *("--attention-backend", "ROCM_AITER_FA"),
        "--enforce-eager",
        "--no-enable-prefix-caching",
        "--enable-scale-out",
    ]
    if machine.model is None:
        arguments.append("--skip-tokenizer-init")
    transfer = ROLES[role]
    if transfer is not None:
        on_device = {key: value for key, value in transfer.items() if key != "kv_buffer_device"}
        arguments += ["--kv-transfer-config", json.dumps(on_device)]
    return Server(role, arguments, environment, directory)


def _cpu_server(machine: Machine, role: str, directory: Path) -> Server:
    options = EngineOptions(
        build_model(directory, CPU_SHAPE),
        "standard" if role == "prefill" else "shuffled",
        block_size=machine.block_size,
        max_model_len=1024,
        transfer=ROLES[role],
    )
    return cpu_server(role, replace(options, num_blocks=128), directory)


def _tokens(answer: dict[str, Any]) -> list[int]:
    tokens: list[int] = answer["choices"][0]["token_ids"]
    return tokens


def _said(log: str) -> list[str]:
    """What says which backend, layout and connector ran."""
    words = ("backend", "layout", "kvpd", "nixl", "aiter", "WARNING", "ERROR")
    lines = [line for line in log.splitlines() if any(word in line for word in words)]
    return lines[:200]
