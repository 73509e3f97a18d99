"""Track whether a scheduler has just started and may not know all workers yet."""

from __future__ import annotations

import time
from collections.abc import Callable

HELD_UP_S = 2.0  # s without a tick: the process was stopped or starved, and heartbeats may still be unread


class Settling:
    """True for a while after the start, and after the process was held up.

    In that time all workers register or send a heartbeat. Rejections are not final until then: routers may
    know workers that this scheduler does not know yet.
    """

    def __init__(self, settle_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Every live worker must send a message within `settle_s` seconds."""
        self._settle_s = settle_s
        self._clock = clock
        self._ticked = clock()
        self._until = self._ticked + settle_s

    def tick(self) -> None:
        """Check the clock. Call it more often than every `HELD_UP_S`."""
        now = self._clock()
        if now - self._ticked > HELD_UP_S:
            self._until = now + self._settle_s
        self._ticked = now

    def __bool__(self) -> bool:
        self.tick()
        return self._clock() < self._until
