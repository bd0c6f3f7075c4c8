"""Start engines (engine.py) in their own processes and talk to them."""

from __future__ import annotations

import atexit
import json
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

# Engines run from here: with the tests' own folder on the path, `import vllm` would find this one.
ROOT = Path(__file__).parents[2]
START_SECONDS = 600.0
REPLY_SECONDS = 120.0
ENGINE = "tests.vllm.engine"
# What engines of a module import; forked with it in place.
PRELOADED = {
    ENGINE: (
        "vllm.distributed.kv_transfer.kv_connector.v1.nixl",
        "vllm.entrypoints.llm",
        "vllm.model_executor.models.qwen3",
        "vllm.v1.engine.core",
        "vllm.v1.worker.cpu_model_runner",
        "vllm.v1.worker.cpu_worker",
    ),
    "tests.gpu.engine": (
        "vllm.distributed.kv_transfer.kv_connector.v1.nixl",
        "vllm.entrypoints.llm",
        "vllm.model_executor.models.qwen3",
        "vllm.v1.engine.core",
    ),
}
BASE_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


class EngineError(RuntimeError):
    """The engine process failed; the message has its traceback and the end of its log."""


def vllm_python() -> str:
    """The interpreter that has vLLM: KVPD_VLLM_PYTHON, else the one that runs the tests."""
    return os.environ.get("KVPD_VLLM_PYTHON", sys.executable)


def free_port() -> int:
    """A port that nobody listens on, below those that the system hands out by itself.

    One of the system's could be given to an outgoing connection before the engine binds it; vLLM
    then waits for its listener for ever.
    """
    while True:
        port = secrets.randbelow(10_000) + 20_000
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port


@dataclass(frozen=True)
class EngineOptions:
    """What one engine runs with.

    Attributes:
        transfer: vLLM's KVTransferConfig; None for colocated.
        module: whose `main` becomes the engine.
        switches: for engines of other modules.
    """

    model: Path
    backend: str
    dtype: str = "bfloat16"
    block_size: int = 16
    num_blocks: int = 96
    max_model_len: int = 512
    max_num_batched_tokens: int = 1024
    enable_prefix_caching: bool = False
    backend_name: str | None = None
    transfer: dict[str, Any] | None = None
    record_nixl: bool = False
    llm_args: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    module: str = ENGINE
    switches: dict[str, Any] = field(default_factory=dict)


class Zygote:
    """A process that has imported what a module's engines import, and forks them (zygote.py)."""

    def __init__(self, module: str) -> None:
        self.module = module
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = os.environ | BASE_ENVIRONMENT
        environment["PYTHONPATH"] = os.pathsep.join(
            [*filter(None, [os.environ.get("PYTHONPATH", "")]), str(ROOT)]
        )
        # Without bytecode every start compiles vLLM and what it imports.
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        # An operator's setting would decide the layout instead of the connector.
        environment.pop("VLLM_KV_CACHE_LAYOUT", None)
        self.environment = environment
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        self._process = subprocess.Popen(
            [
                *(vllm_python(), "-m", "tests.vllm.zygote", str(theirs.fileno())),
                *PRELOADED.get(module, ()),
            ],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env=environment,
            cwd=ROOT,
        )
        theirs.close()
        self._socket = ours
        atexit.register(self._process.kill)
        ours.settimeout(START_SECONDS)
        if ours.recv(16) != b"ready\n":
            self._log.seek(0)
            raise EngineError(f"vLLM cannot be imported\n{self._log.read().decode()[-6000:]}")

    def fork(
        self, options: dict[str, Any], environment: dict[str, str], log: BinaryIO
    ) -> tuple[int, int, int]:
        """Start an engine; its pid, and the ends of its stdin and stdout that are ours."""
        stdin_theirs, stdin_ours = os.pipe()
        stdout_ours, stdout_theirs = os.pipe()
        message = {
            "module": self.module,
            "options": options,
            "environment": self.environment | environment,
        }
        descriptors = [stdin_theirs, stdout_theirs, log.fileno()]
        socket.send_fds(self._socket, [json.dumps(message).encode()], descriptors)
        pid = int(self._socket.recv(16))
        os.close(stdin_theirs)
        os.close(stdout_theirs)
        return pid, stdin_ours, stdout_ours


@cache
def zygote(module: str) -> Zygote:
    """The one of this test session."""
    return Zygote(module)


class EngineProcess:
    """A running engine. Use as a context manager; `call` runs one command of engine.Engine."""

    def __init__(self, name: str, options: EngineOptions, log_directory: Path) -> None:
        self.name = name
        self.log_path = log_directory / f"{name}-{os.getpid()}-{time.monotonic_ns()}.log"
        self._log = self.log_path.open("wb")
        arguments = {
            "model": str(options.model),
            "backend": options.backend,
            "backend_name": options.backend_name,
            "dtype": options.dtype,
            "block_size": options.block_size,
            "num_blocks": options.num_blocks,
            "max_model_len": options.max_model_len,
            "max_num_batched_tokens": options.max_num_batched_tokens,
            "enable_prefix_caching": options.enable_prefix_caching,
            "kv_transfer_config": options.transfer,
            "record_nixl": options.record_nixl,
            "llm_args": options.llm_args,
            "switches": options.switches,
        }
        environment = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())} | options.environment
        self._pid, self._stdin, self._stdout = zygote(options.module).fork(
            arguments, environment, self._log
        )
        self._buffer = b""
        self._facts: dict[str, Any] | None = None

    @property
    def facts(self) -> dict[str, Any]:
        """What the engine says about itself once it is up (waits for that)."""
        if self._facts is None:
            self._facts = self._receive(START_SECONDS)
        return self._facts

    @property
    def log(self) -> str:
        self._log.flush()
        return self.log_path.read_text(errors="replace")

    def call(self, command: str, **arguments: Any) -> Any:
        _ = self.facts
        message = json.dumps({"command": command, "arguments": arguments}) + "\n"
        try:
            os.write(self._stdin, message.encode())
        except BrokenPipeError:
            raise EngineError(f"{self.name} is gone\n{self._tail()}") from None
        return self._receive(REPLY_SECONDS)

    def pages(self, directory: Path, blocks: list[int] | None = None) -> NDArray[np.uint8]:
        """The bytes of these blocks, all by default, [layer, block, page bytes]."""
        path = directory / f"{self.name}-{time.monotonic_ns()}.npy"
        self.call("dump", path=str(path), blocks=blocks)
        pages: NDArray[np.uint8] = np.load(path)
        return pages

    def run(
        self, requests: Sequence[dict[str, Any]], seconds: float = 120.0
    ) -> dict[str, dict[str, Any]]:
        """Submit requests at once and wait until all have finished; their results by id."""
        self.call("submit", requests=list(requests))
        return self.wait([request["id"] for request in requests], seconds)

    def wait(self, ids: Sequence[str], seconds: float = 120.0) -> dict[str, dict[str, Any]]:
        deadline = time.monotonic() + seconds
        while True:
            outputs = self.call("results")["outputs"]
            if all(outputs.get(name, {}).get("finished") for name in ids):
                return {name: outputs[name] for name in ids}
            if time.monotonic() > deadline:
                raise EngineError(f"{self.name}: {ids} did not finish\n{self._tail()}")
            time.sleep(0.02)

    def kill(self) -> None:
        """End the process at once, as a crash would."""
        if self.is_running():
            os.kill(self._pid, signal.SIGKILL)
            self._wait_gone(20.0)

    def is_running(self) -> bool:
        try:
            os.kill(self._pid, 0)
        except ProcessLookupError:
            return False
        return True

    def close(self) -> None:
        """End the engine: the end of its stdin asks it to, a signal makes it."""
        if self._stdin >= 0:
            os.close(self._stdin)
            self._stdin = -1
            self._wait_gone(20.0)
            self.kill()
            os.close(self._stdout)
            self._log.close()

    def _wait_gone(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self.is_running() and time.monotonic() < deadline:
            time.sleep(0.02)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _receive(self, seconds: float) -> Any:
        deadline = time.monotonic() + seconds
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self._stdout], [], [], 0.25)
            chunk = os.read(self._stdout, 1 << 20) if ready else None
            if chunk == b"":
                raise EngineError(f"{self.name} ended\n{self._tail()}")
            if chunk is not None:
                self._buffer += chunk
            elif time.monotonic() > deadline:
                raise EngineError(f"{self.name} did not answer\n{self._tail()}")
        line, self._buffer = self._buffer.split(b"\n", 1)
        message = json.loads(line)
        for kind in ("error", "fatal"):
            if kind in message:
                raise EngineError(f"{self.name}: {message[kind]}\n{self._tail()}")
        return message["value"]

    def _tail(self) -> str:
        return "--- log ---\n" + self.log[-6000:]
