"""A vLLM plugin, as a user's own backend would come: put a test backend where the CPU has one.

vLLM loads it in each of its processes, by the entry point that `server.py` writes. Which backend:
KVPD_TEST_BACKEND.
"""

from __future__ import annotations

import os


def register() -> None:
    """Override the CPU platform's backend; an override of that member is honoured."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from tests.patience import let_handshakes_wait, let_nixl_wait
    from tests.vllm.backends import BACKENDS

    let_nixl_wait()
    let_handshakes_wait()
    backend = BACKENDS[os.environ["KVPD_TEST_BACKEND"]]
    register_backend(AttentionBackendEnum.CPU_ATTN, f"{backend.__module__}.{backend.__qualname__}")
