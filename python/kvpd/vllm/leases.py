"""Until when a peer keeps the blocks of a request, as far as we can know.

The prefill publishes the deadline it will keep; each heartbeat that reaches it before moves it.
A heartbeat has no answer, so one counts only if it left well before the deadline it renews.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

# A heartbeat takes effect when the peer's engine gets to it, not when it is sent, and the
# clocks' offset is an estimate.
MARGIN_SECONDS = 2.0


@dataclass
class Leases:
    """Deadlines of remote requests; all times are readings of the local clock.

    Attributes:
        extension_seconds: how long after a heartbeat the peer keeps the blocks at least.
    """

    extension_seconds: float
    _sent: dict[str, list[float]] = field(default_factory=dict)

    def renew(self, remote_request_ids: Iterable[str], now: float) -> None:
        """Heartbeats for these requests were sent at `now`."""
        # Requests end without telling us; their heartbeats stop.
        self._sent = {
            key: sent for key, sent in self._sent.items() if sent[-1] + self.extension_seconds > now
        }
        for key in remote_request_ids:
            self._sent.setdefault(key, []).append(now)

    def deadline(self, remote_request_id: str, published: float | None) -> float | None:
        """When the peer may reuse the request's blocks; None where the peer publishes nothing."""
        if published is None:
            return None
        until = published - MARGIN_SECONDS
        for sent in self._sent.get(remote_request_id, ()):
            # A lease that has run out is not revived: the peer no longer knows the request.
            if sent < until:
                until = max(until, sent + self.extension_seconds - MARGIN_SECONDS)
        return until
