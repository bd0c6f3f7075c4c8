"""Fork engines from a process that has imported vLLM already; see client.py.

Importing vLLM and torch costs more than everything else an engine of the test bed does at start.
The zygote imports and does nothing else: no threads, no devices, no engine. Each engine is still a
process of its own, with its own environment.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading

MAX_MESSAGE_BYTES = 1 << 16


def preload() -> None:
    """Import what an engine imports."""
    import vllm.distributed.kv_transfer.kv_connector.v1.nixl
    import vllm.entrypoints.llm
    import vllm.model_executor.models.qwen3
    import vllm.v1.engine.core
    import vllm.v1.worker.cpu_model_runner
    import vllm.v1.worker.cpu_worker  # noqa: F401

    if threading.active_count() != 1:
        raise RuntimeError(f"not safe to fork: {threading.enumerate()}")


def child(message: dict[str, object], descriptors: list[int]) -> None:
    """Become an engine; does not return."""
    for target, descriptor in enumerate(descriptors):
        os.dup2(descriptor, target)
        os.close(descriptor)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(message["environment"])  # type: ignore[call-overload]
    from tests.vllm import engine

    try:
        engine.main(message["options"])  # type: ignore[arg-type]
    finally:
        os._exit(1)


def main() -> None:
    server = socket.socket(fileno=int(sys.argv[1]))
    preload()
    # Engines are waited for by nobody; without this they would stay as zombies.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    server.sendall(b"ready\n")
    while True:
        raw, descriptors, _, _ = socket.recv_fds(server, MAX_MESSAGE_BYTES, 3)
        if not raw:
            return
        message = json.loads(raw)
        pid = os.fork()
        if pid == 0:
            server.close()
            child(message, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        server.sendall(f"{pid}\n".encode())


if __name__ == "__main__":
    main()
