"""The connector that vLLM loads: stock's pull connector with our worker, scheduler and metrics."""

from __future__ import annotations

from typing import Any

from kvpd.vllm.adapter import (
    KVConnectorRole,
    KvpdPromMetrics,
    KvpdScheduler,
    KvpdStats,
    KvpdWorker,
    NixlBaseConnector,
    NixlPullConnector,
    Releases,
    check_configuration,
    own_layout,
    register,
)
from kvpd.vllm.config import ConnectorConfig


class KvpdConnector(NixlPullConnector):
    """NIXL pull connector that publishes page formats, judges peers by them, and converts.

    Raises:
        KvpdError: a key of ours has a bad value, conversion is asked for and cannot be had, or the
            engine is configured in a way that kvpd does not serve.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        check_configuration(vllm_config)
        # Stock's pull constructor would build stock's worker and a second NIXL agent.
        NixlBaseConnector.__init__(self, vllm_config, role, kv_cache_config)
        self.connector_scheduler = None
        self.connector_worker = None
        if role == KVConnectorRole.SCHEDULER:
            self.connector_scheduler = KvpdScheduler(vllm_config, self.engine_id, kv_cache_config)
        elif role == KVConnectorRole.WORKER:
            self.connector_worker = KvpdWorker(vllm_config, self.engine_id, kv_cache_config)

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """As the base connector, and let it keep what a decoder needs of windows."""
        super().bind_kv_cache_manager(kv_cache_manager)
        if self.connector_scheduler is not None:
            self.connector_scheduler.bind_kv_cache_manager(kv_cache_manager)

    def build_connector_worker_meta(self) -> Releases | None:
        """Whose notices made this rank give blocks back, for the scheduler."""
        releases: Releases | None = None
        if self.connector_worker is not None:
            with self.connector_worker.going_on():
                releases = self.connector_worker.take_releases()
        return releases

    def reset_cache(self) -> bool | None:
        """As stock. vLLM calls this before it lets go of what the cache holds, as for sleep."""
        if self.connector_scheduler is not None:
            self.connector_scheduler.let_go()
        stock: bool | None = super().reset_cache()
        return stock

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Stock's preference, except for backends whose pages are not one plane: their own."""
        stock: str | None = super().get_required_kvcache_layout(vllm_config)
        return stock if stock is None else own_layout(vllm_config) or stock

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """As stock (from 0.33 on), but not with memory of ours, or that others have mapped.

        Asleep, it would be unmapped while NIXL or a decoder still held what was there. Without
        `slab_bytes` an engine that can sleep has no slab (`kvpd.vllm.slab_size.takes_default`).
        """
        config = ConnectorConfig.of(kv_transfer_config.kv_connector_extra_config)
        if (config.page_format_conversion and config.slab_bytes) or config.direct_transfer:
            return False
        stock = getattr(super(), "supports_sleep_mode", None)
        return stock is not None and bool(stock(kv_transfer_config))

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvpdStats:
        """Stats from what a worker sent, or empty ones."""
        return KvpdStats() if data is None else KvpdStats(data=data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KvpdPromMetrics:
        """Prometheus metrics for `KvpdStats`."""
        return KvpdPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


# vLLM turns some features on by this name.
NixlConnector = KvpdConnector

register(KvpdConnector)
