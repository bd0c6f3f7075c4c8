"""Who reads which remote request: the notice after a read lets the peer reuse the blocks."""

from __future__ import annotations

from collections import OrderedDict

# Requests of the peers that are remembered; a lease is long over when so many others have come.
MAX_REMEMBERED = 1 << 14


class Readers:
    """The one request that may read a remote one.

    A second one (of ``n`` above 1, of a client that asks again) would read blocks that may be
    another's by then, and nothing in them would say so.
    """

    def __init__(self) -> None:
        # None: read, and its blocks were given back.
        self._readers: OrderedDict[tuple[str, str], str | None] = OrderedDict()
        self._remotes: dict[str, tuple[str, str]] = {}
        # For which of our requests the first notice was sent, or rides on a READ.
        self._notified: OrderedDict[tuple[str, str], str] = OrderedDict()

    def begin(self, engine_id: str, remote_request_id: str, request_id: str) -> bool:
        """Whether `request_id` may read this request of a peer: no other reads it, or has."""
        remote = (engine_id, remote_request_id)
        if self._readers.setdefault(remote, request_id) != request_id:
            return False
        self._remotes[request_id] = remote
        if len(self._readers) > MAX_REMEMBERED:
            _, reader = self._readers.popitem(last=False)
            if reader is not None:
                self._remotes.pop(reader, None)
        return True

    def notifies(self, engine_id: str, remote_request_id: str, request_id: str) -> bool:
        """A notice is sent for this request of ours; whether none was for another one.

        If one was, that the peer released the blocks at our notice does not say at which.
        """
        remote = (engine_id, remote_request_id)
        is_only = self._notified.setdefault(remote, request_id) == request_id
        if len(self._notified) > MAX_REMEMBERED:
            self._notified.popitem(last=False)
        return is_only

    def end(self, request_id: str, *, is_released: bool) -> None:
        """Its read has ended; others may try unless the peer was told. Idempotent."""
        remote = self._remotes.pop(request_id, None)
        if remote is None:
            return
        if is_released:
            self._readers[remote] = None
        else:
            del self._readers[remote]
