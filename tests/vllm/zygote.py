"""Fork engines from a process that has imported their modules already; see client.py.

    python -m tests.vllm.zygote DESCRIPTOR [MODULE ...]

Importing vLLM and torch costs more than everything else an engine of the test bed does at start.
The zygote imports and does nothing else: no threads, no devices, no engine. Each engine is still a
process of its own, with its own environment.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import sys
import threading

MAX_MESSAGE_BYTES = 1 << 16


def preload(modules: list[str]) -> None:
    """Import what engines import."""
    for name in modules:
        importlib.import_module(name)
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
    try:
        importlib.import_module(str(message["module"])).main(message["options"])
    finally:
        os._exit(1)


def main() -> None:
    server = socket.socket(fileno=int(sys.argv[1]))
    preload(sys.argv[2:])
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
