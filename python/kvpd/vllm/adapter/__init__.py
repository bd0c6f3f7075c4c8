"""Everything kvpd knows about vLLM's internals is in this package, and nowhere else in kvpd."""

from __future__ import annotations

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import (
    NixlBaseConnector,
    NixlPullConnector,
)

from kvpd.vllm.adapter.description import own_layout
from kvpd.vllm.adapter.limits import check_configuration
from kvpd.vllm.adapter.registration import register
from kvpd.vllm.adapter.releases import Releases
from kvpd.vllm.adapter.scheduler import KvpdScheduler
from kvpd.vllm.adapter.stats import KvpdPromMetrics, KvpdStats
from kvpd.vllm.adapter.worker import KvpdWorker

__all__ = [
    "KVConnectorRole",
    "KvpdPromMetrics",
    "KvpdScheduler",
    "KvpdStats",
    "KvpdWorker",
    "NixlBaseConnector",
    "NixlPullConnector",
    "Releases",
    "check_configuration",
    "own_layout",
    "register",
]
