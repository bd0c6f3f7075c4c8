"""Metrics through vLLM's own connector stats and Prometheus classes.

Everything stock counts stays as it is; what follows is added, under ``vllm:kvpd_*``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import (
    NixlKVConnectorStats,
    NixlPromMetrics,
)

from kvpd.request import Ready

# Name in the stats, and what `observe` does with each item of its list.
READ_SECONDS = "kvpd_read_seconds"
CONVERT_SECONDS = "kvpd_convert_seconds"
QUEUED_SECONDS = "kvpd_queued_seconds"
HELD_SECONDS = "kvpd_held_seconds"
PAGES = "kvpd_pages_converted"
BYTES = "kvpd_bytes_converted"
UNTAGGED = "kvpd_untagged_peers"
SECOND_READERS = "kvpd_second_readers"
REFUSALS = "kvpd_refusals"
PLACEMENTS = "kvpd_requests"
FAILURES = "kvpd_failed_requests"
SLAB_USE = "kvpd_slab_use"
_LISTS = (
    *(READ_SECONDS, CONVERT_SECONDS, QUEUED_SECONDS, HELD_SECONDS, PLACEMENTS, PAGES, BYTES),
    *(UNTAGGED, SECOND_READERS, REFUSALS, FAILURES, SLAB_USE),
)

_BUCKETS = [
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1),
    *(0.25, 0.5, 1.0, 2.5, 5.0),
]


class KvpdStats(NixlKVConnectorStats):
    """Stock's stats and ours, as lists of plain numbers and strings."""

    def reset(self) -> None:
        """Empty all lists."""
        # In one assignment: handshakes count on another thread, and must find every list.
        self.data = NixlKVConnectorStats().data | {name: [] for name in _LISTS}

    def record_ready(self, ready: Ready) -> None:
        """A request's pages are there; stock's own lists count the transfer too."""
        counts, timings = ready.descriptors, ready.timings
        self.data["transfer_duration"].append(timings.read_seconds)
        self.data["post_duration"].append(ready.post_seconds)
        self.data["bytes_transferred"].append(ready.num_bytes)
        self.data["num_descriptors"].append(
            counts.merged if counts.counted is None else counts.counted
        )
        self.data[PLACEMENTS].append(ready.placement)
        self.data[READ_SECONDS].append(timings.read_seconds)
        self.data[CONVERT_SECONDS].append(timings.convert_seconds)
        self.data[QUEUED_SECONDS].append(timings.queued_seconds)
        if timings.held_seconds is not None:
            self.data[HELD_SECONDS].append(timings.held_seconds)
        if ready.is_converted:
            self.data[PAGES].append(ready.num_blocks)
            self.data[BYTES].append(ready.num_bytes)

    def record_refusal(self, codes: Sequence[str]) -> None:
        """A handshake was refused, for these reasons."""
        self.data[REFUSALS].extend(codes)

    def record_failed_request(self, code: str) -> None:
        """One request was ended, for this reason."""
        self.data[FAILURES].append(code)

    def record_untagged_peer(self) -> None:
        """A peer without a tag was accepted."""
        self.data[UNTAGGED].append(1)

    def record_second_reader(self) -> None:
        """A request was turned away: another one reads, or has read, the same remote request."""
        self.data[SECOND_READERS].append(1)

    def record_slab_use(self, fraction: float) -> None:
        """How much of the slab is taken, 0 to 1."""
        self.data[SLAB_USE].append(fraction)

    def is_empty(self) -> bool:
        """Whether there is nothing to report."""
        return not any(self.data.values())

    def reduce(self) -> dict[str, int | float]:
        """Stock's summary, and ours where something happened."""
        summary = dict(super().reduce())
        for placement in sorted(set(self.data[PLACEMENTS])):
            summary[f"Num {placement} requests"] = self.data[PLACEMENTS].count(placement)
        if self.data[PAGES]:
            summary["Num converted pages"] = sum(self.data[PAGES])
        for title, name in (("convert", CONVERT_SECONDS), ("read", READ_SECONDS)):
            if seconds := self.data[name]:
                summary[f"Avg {title} time (ms)"] = round(1e3 * sum(seconds) / len(seconds), 3)
        if self.data[SECOND_READERS]:
            summary["Num second readers"] = len(self.data[SECOND_READERS])
        if self.data[REFUSALS]:
            summary["Num refusal reasons"] = len(self.data[REFUSALS])
        return summary


class KvpdPromMetrics(NixlPromMetrics):
    """Stock's Prometheus metrics and ours."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._labelvalues = per_engine_labelvalues

        def histogram(name: str, documentation: str) -> Any:
            return self._histogram_cls(
                name=f"vllm:{name}",
                documentation=documentation,
                buckets=_BUCKETS,
                labelnames=labelnames,
            )

        def counter(name: str, documentation: str, extra: tuple[str, ...] = ()) -> Any:
            return self._counter_cls(
                name=f"vllm:{name}",
                documentation=documentation,
                labelnames=[*labelnames, *extra],
            )

        self._histograms = {
            READ_SECONDS: histogram(
                READ_SECONDS,
                "Seconds to read the pages of one request; direct ones are converted meanwhile.",
            ),
            CONVERT_SECONDS: histogram(
                CONVERT_SECONDS, "Seconds until all pages of one request were converted after that."
            ),
            QUEUED_SECONDS: histogram(
                QUEUED_SECONDS, "Seconds one request waited for its turn to be read."
            ),
            HELD_SECONDS: histogram(
                HELD_SECONDS, "Seconds until the peer had said that it still held what was read."
            ),
        }
        self._counters = {
            PAGES: counter(PAGES, "Blocks converted; a block counts once for all layers."),
            BYTES: counter(BYTES, "Bytes of converted pages."),
            UNTAGGED: counter(UNTAGGED, "Peers accepted without a page format tag."),
            SECOND_READERS: counter(
                SECOND_READERS, "Requests for blocks that another request reads or has read."
            ),
        }
        self._named = {
            REFUSALS: counter(REFUSALS, "Reasons for which handshakes were refused.", ("reason",)),
            FAILURES: counter(FAILURES, "Requests that were ended alone, by reason.", ("reason",)),
            PLACEMENTS: counter(
                PLACEMENTS, "Requests whose pages kvpd brought, by placement.", ("placement",)
            ),
        }
        self._slab_use = self._gauge_cls(
            name=f"vllm:{SLAB_USE}",
            documentation="Fraction of the slab that is taken, as requests start.",
            labelnames=labelnames,
        )
        # A metric shows up with its first label; at 0 it can be told from one that is not there.
        for labels in per_engine_labelvalues.values():
            for metric in (*self._histograms.values(), *self._counters.values(), self._slab_use):
                metric.labels(*labels)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Record one interval's lists."""
        super().observe(transfer_stats_data, engine_idx)
        labels = self._labelvalues[engine_idx]
        for name, metric in self._histograms.items():
            for seconds in transfer_stats_data.get(name, ()):
                metric.labels(*labels).observe(seconds)
        for name, metric in self._counters.items():
            total = sum(transfer_stats_data.get(name, ()))
            if total:
                metric.labels(*labels).inc(total)
        for name, metric in self._named.items():
            for word in transfer_stats_data.get(name, ()):
                metric.labels(*labels, word).inc()
        for fraction in transfer_stats_data.get(SLAB_USE, ())[-1:]:
            self._slab_use.labels(*labels).set(fraction)
