"""What kvpd does not serve and can tell from an engine's configuration."""

from __future__ import annotations

from typing import Any

from kvpd.errors import KvpdError


def check_configuration(vllm_config: Any) -> None:
    """Refuse to start where tokens could come out wrong later, peer by peer, without a word.

    Raises:
        KvpdError: which key of vLLM's, and what it has to be.
    """
    # Ranks that share a context hold every n-th token or block of it, which no fact in a handshake
    # says. vLLM's own guards against that look for a connector named NixlConnector.
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        size = getattr(vllm_config.parallel_config, name)
        if size != 1:
            raise config_error(name, size, "1")
    # One peer with another layout switches it on for the whole worker: the blocks of every peer
    # are permuted from then on, also those that were right as they came.
    if vllm_config.kv_transfer_config.enable_permute_local_kv:
        raise config_error("enable_permute_local_kv", True, "false")


def config_error(field: str, got: object, expected: str) -> KvpdError:
    """A key of vLLM's configuration that has to be another one."""
    return KvpdError(
        f"{field} is {got!r}; kvpd needs {expected}",
        code="invalid-config",
        field=field,
        got=got,
        expected=expected,
    )
