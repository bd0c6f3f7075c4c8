"""Stock's pull scheduler, with what kvpd adds to the parameters of requests."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import (
    NixlPullConnectorScheduler,
)


class KvpdScheduler(NixlPullConnectorScheduler):
    """Stock's scheduler; a prefill also publishes until when it keeps a request's blocks."""

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        """As stock, with ``remote_blocks_expiry_time`` filled in."""
        delayed, params = super().request_finished(request, block_ids)
        if self.is_bidirectional_kv_xfer_enabled:
            # There stock reads it as a date that heartbeats do not move, and declines live leases.
            return delayed, params
        if params is not None and params.get("remote_blocks_expiry_time") is None:
            # In this process's clock, like the deadlines stock publishes in the other direction;
            # a reader corrects it by the offset that the handshake measured.
            params["remote_blocks_expiry_time"] = self._reqs_need_send.get(request.request_id)
        return delayed, params
