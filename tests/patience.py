"""What a server has cores for, on the few that engines here share with each other and the tests.

NIXL's Python tells its progress thread never to sleep: an agent takes a whole core while nothing is
transferred, and one that was not collected yet goes on. A handshake, for which vLLM waits five
seconds, has gone unanswered for that long.
"""

from __future__ import annotations

from typing import Any

PROGRESS_DELAY_MICROSECONDS = 1000
VLLM_HANDSHAKE_MILLISECONDS = 5_000
HANDSHAKE_MILLISECONDS = 20_000


def let_nixl_wait() -> None:
    """Agents made from now on look for events this often, and at once when one comes."""
    from nixl._api import nixlBind

    native = nixlBind.nixlAgentConfig
    if native.__module__ == __name__:
        return

    class PatientConfig(native):  # type: ignore[misc,valid-type,unused-ignore]
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, PROGRESS_DELAY_MICROSECONDS if name == "pthrDelay" else value)

    nixlBind.nixlAgentConfig = PatientConfig


def let_handshakes_wait() -> None:
    """vLLM's decoder waits longer for a prefill's answer than the time it has fixed."""
    import zmq

    native = zmq.Socket.setsockopt
    if native.__module__ == __name__:
        return

    def patient(socket: zmq.Socket[bytes], option: int, value: Any) -> None:
        is_handshake = (option, value) == (zmq.RCVTIMEO, VLLM_HANDSHAKE_MILLISECONDS)
        native(socket, option, HANDSHAKE_MILLISECONDS if is_handshake else value)

    zmq.Socket.setsockopt = patient  # type: ignore[method-assign,assignment,unused-ignore]
