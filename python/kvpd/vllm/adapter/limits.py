"""What kvpd does not serve and can tell from an engine's configuration."""

from __future__ import annotations

from typing import Any

from vllm import envs

from kvpd.errors import KvpdError
from kvpd.vllm.adapter.description import own_layout

# vLLM's older names.
_LAYOUT_ALIASES = {"NHD": "LBNHC", "HND": "LBHNC"}


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
    # What is misspelt or of another type is `ConnectorConfig`'s to say.
    if vllm_config.kv_transfer_config.kv_connector_extra_config.get("page_format_conversion"):
        _check_conversion(vllm_config)


def _check_conversion(vllm_config: Any) -> None:
    """Refuse what would make every request that has to be converted fail."""
    key = "kv_connector_extra_config.page_format_conversion"
    # In the second turn the prefill reads the decoder's pages, which nobody converts back.
    if vllm_config.kv_transfer_config.kv_connector_extra_config.get("bidirectional_kv_xfer"):
        raise KvpdError(
            "page_format_conversion and bidirectional_kv_xfer are both on: pages are converted "
            "from standard to shuffled only, so what a shuffled engine computed cannot be read "
            "back. Switch bidirectional_kv_xfer off, or use one page format on both sides and "
            "switch page_format_conversion off",
            code="invalid-config",
            field=f"{key}, kv_connector_extra_config.bidirectional_kv_xfer",
            got="both true",
            expected="at most one of them",
        )
    forced = envs.VLLM_KV_CACHE_LAYOUT
    own = None if forced is None else own_layout(vllm_config)
    if own is not None and _LAYOUT_ALIASES.get(forced, forced) != own:
        raise KvpdError(
            f"VLLM_KV_CACHE_LAYOUT is {forced}, and page_format_conversion can only write pages "
            f"of this attention backend in {own}: leave VLLM_KV_CACHE_LAYOUT unset, {own} is "
            "chosen then; or switch page_format_conversion off",
            code="invalid-config",
            field="VLLM_KV_CACHE_LAYOUT",
            got=forced,
            expected=f"unset, or {own}",
        )


def config_error(field: str, got: object, expected: str) -> KvpdError:
    """A key of vLLM's configuration that has to be another one."""
    return KvpdError(
        f"{field} is {got!r}; kvpd needs {expected}",
        code="invalid-config",
        field=field,
        got=got,
        expected=expected,
    )
