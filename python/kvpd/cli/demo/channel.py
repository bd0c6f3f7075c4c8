"""Length-prefixed frames between the two processes, over one end of a socket pair."""

from __future__ import annotations

import json
import socket
from typing import Any

from kvpd.errors import TransferError

MAX_FRAME_BYTES = 64 << 20
_LENGTH_BYTES = 4


class Channel:
    """Frames of raw bytes, or of JSON.

    Args:
        end: a connected stream socket; closed with the channel.
        timeout_seconds: how long one receive may take.
    """

    def __init__(self, end: socket.socket, timeout_seconds: float) -> None:
        self._end = end
        self._end.settimeout(timeout_seconds)

    def send(self, frame: bytes) -> None:
        """Send one frame. Raises `TransferError` when the other side is gone."""
        try:
            self._end.sendall(len(frame).to_bytes(_LENGTH_BYTES, "big") + frame)
        except OSError as error:
            raise _gone(error) from error

    def receive(self) -> bytes:
        """Wait for one frame. Raises `TransferError` when none comes."""
        num_bytes = int.from_bytes(self._exactly(_LENGTH_BYTES), "big")
        if num_bytes > MAX_FRAME_BYTES:
            raise TransferError(
                f"a frame of {num_bytes} bytes", code="oversized", field="frame", got=num_bytes
            )
        return self._exactly(num_bytes)

    def send_json(self, value: Any) -> None:
        """Send plain values."""
        self.send(json.dumps(value).encode())

    def receive_json(self) -> Any:
        """Wait for plain values."""
        return json.loads(self.receive())

    def close(self) -> None:
        """Close this end; the other side's next receive fails."""
        self._end.close()

    def _exactly(self, num_bytes: int) -> bytes:
        parts: list[bytes] = []
        while num_bytes:
            try:
                part = self._end.recv(num_bytes)
            except OSError as error:
                raise _gone(error) from error
            if not part:
                raise _gone("it closed the connection")
            parts.append(part)
            num_bytes -= len(part)
        return b"".join(parts)


def _gone(why: object) -> TransferError:
    return TransferError(f"the other process is gone: {why}", code="peer-gone", field="channel")
