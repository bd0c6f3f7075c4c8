"""NIXL's progress thread, made to wait for events.

NIXL's Python tells that thread never to sleep: an agent takes a whole core while nothing is
transferred. A server has that core to give. Here engines, and agents that were not collected yet,
share two cores with each other and the tests; a handshake, for which vLLM waits five seconds, has
gone unanswered for that long.
"""

from __future__ import annotations

from typing import Any

PROGRESS_DELAY_MICROSECONDS = 1000


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
