"""kvpd's connector for vLLM.

    --kv-transfer-config '{"kv_connector": "KvpdConnector",
        "kv_connector_module_path": "kvpd.vllm", "kv_role": "kv_consumer",
        "kv_connector_extra_config": {"page_format_conversion": true}}'

The connector is imported when it is asked for. That needs vLLM and NIXL, of releases on which it
was tried.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvpd.errors import MissingDependencyError
from kvpd.vllm.versions import check_nixl, check_vllm

if TYPE_CHECKING:
    from kvpd.vllm.connector import KvpdConnector, NixlConnector

__all__ = ["KvpdConnector", "NixlConnector"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from vllm import __version__ as vllm_version
    except ImportError as error:
        raise MissingDependencyError(
            "kvpd.vllm needs vLLM: pip install 'kvpd[vllm]'",
            code="missing-dependency",
            field="vllm",
            got="not installed",
            expected="kvpd[vllm]",
        ) from error
    # Before anything of theirs is touched: an unknown release must fail with its name, not with
    # whatever attribute moved.
    check_vllm(vllm_version)
    check_nixl()
    from kvpd.vllm import connector

    return getattr(connector, name)
