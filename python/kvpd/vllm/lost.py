"""Peers that a READ or a notice did not reach.

NIXL goes on to say that it knows such a peer, whether its process is gone, another one has started
under its engine ID, or only the connection was lost. So it is let go of, and the next request
shakes hands with whoever answers at its address by then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

FIRST_PAUSE_SECONDS = 1.0
# A handshake with a host that does not answer takes vLLM 5 s of a thread that all peers share, and
# a peer that comes back is refused for as long as a pause lasts.
MAX_PAUSE_SECONDS = 8.0
# A peer that was not lost again for so long starts from the beginning.
FORGOTTEN_SECONDS = 60.0


@dataclass
class _Loss:
    pause_seconds: float = 0.0
    until: float = 0.0
    is_known: bool = True

    def lengthen(self) -> None:
        doubled = max(2 * self.pause_seconds, FIRST_PAUSE_SECONDS)
        self.pause_seconds = min(doubled, MAX_PAUSE_SECONDS)


class LostPeers:
    """Which peers are lost, and when the next handshake with one may begin.

    The first loss costs no pause: at most the request that found it out fails. Each further one
    before something was read again doubles the pause, from 1 s to 8 s.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._losses: dict[str, _Loss] = {}

    def note(self, engine_id: str) -> None:
        """Something did not reach this peer. Idempotent until it was let go of."""
        self._forget_old()
        loss = self._losses.get(engine_id)
        if loss is None:
            self._losses[engine_id] = _Loss()
        elif not loss.is_known:
            loss.lengthen()
            loss.is_known = True

    def known(self) -> list[str]:
        """Lost peers that have not been let go of."""
        return [engine_id for engine_id, loss in self._losses.items() if loss.is_known]

    def is_known(self, engine_id: str) -> bool:
        """Whether a peer is one of them: nothing new may be asked of it."""
        loss = self._losses.get(engine_id)
        return loss is not None and loss.is_known

    def let_go(self, engine_id: str) -> float:
        """Nothing of the peer is left. Returns the seconds before the next handshake."""
        loss = self._losses[engine_id]
        loss.is_known = False
        loss.until = self._clock() + loss.pause_seconds
        return loss.pause_seconds

    def unreachable(self, engine_id: str) -> None:
        """Its address did not answer; of a peer that was never lost, nothing is kept.

        For the handshake's thread; the other calls come from the engine's.
        """
        loss = self._losses.get(engine_id)
        if loss is not None:
            loss.lengthen()
            loss.until = self._clock() + loss.pause_seconds

    def pause_seconds(self, engine_id: str) -> float:
        """How long no handshake may begin; 0 where one may."""
        loss = self._losses.get(engine_id)
        return 0.0 if loss is None else max(0.0, loss.until - self._clock())

    def was_read(self, engine_id: str) -> None:
        """Something of the peer was read: what was before does not count any more."""
        loss = self._losses.get(engine_id)
        if loss is not None and not loss.is_known:
            del self._losses[engine_id]

    def _forget_old(self) -> None:
        # Engine IDs are random where nobody fixes them; most that were lost never come back.
        now = self._clock()
        self._losses = {
            engine_id: loss
            for engine_id, loss in self._losses.items()
            if loss.is_known or now < loss.until + FORGOTTEN_SECONDS
        }
