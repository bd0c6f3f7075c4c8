"""The operator's keys in vLLM's ``kv_connector_extra_config``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvpd.errors import KvpdError


@dataclass(frozen=True)
class ConnectorConfig:
    """What an operator chose.

    Attributes:
        page_format_conversion: on a decoder, accept peers whose page format is another one and
            convert their pages, where the pair is in scope. Off: such peers are refused.
        require_tagged_peers: refuse peers that publish no page format, whatever our own pages are.
        slab_bytes: memory in which raw pages land before they are converted into the cache. 0:
            they land in the cache itself, which needs no memory but makes two short descriptors of
            each page.
    """

    page_format_conversion: bool = False
    require_tagged_peers: bool = False
    slab_bytes: int = 0

    @classmethod
    def of(cls, extra: Mapping[str, Any]) -> ConnectorConfig:
        """Read our keys; others belong to vLLM.

        Raises:
            KvpdError: a key has a value of another kind. Nothing is guessed from a truthy string.
        """
        slab_bytes = extra.get("slab_bytes", 0)
        if isinstance(slab_bytes, bool) or not isinstance(slab_bytes, int) or slab_bytes < 0:
            raise _invalid("slab_bytes", slab_bytes, "a number of bytes, 0 or more")
        return cls(
            page_format_conversion=_flag(extra, "page_format_conversion"),
            require_tagged_peers=_flag(extra, "require_tagged_peers"),
            slab_bytes=slab_bytes,
        )


def _flag(extra: Mapping[str, Any], key: str) -> bool:
    value = extra.get(key, False)
    if not isinstance(value, bool):
        raise _invalid(key, value, "true or false")
    return value


def _invalid(key: str, value: object, expected: str) -> KvpdError:
    return KvpdError(
        f"kv_connector_extra_config.{key} is {value!r}; expected {expected}",
        code="invalid-config",
        field=f"kv_connector_extra_config.{key}",
        got=repr(value),
        expected=expected,
    )
