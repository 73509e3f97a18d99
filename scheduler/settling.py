"""The time after a start in which a scheduler may not know all workers yet."""

from __future__ import annotations

import time
from collections.abc import Callable

HELD_UP_S = 2.0  # s without a tick: this process was stopped or starved, and leases may have expired unheard


class Settling:
    """Be true for a while after the start, and after the process was held up.

    Meanwhile all workers register or send a heartbeat. Rejections during that time are not final: routers may
    know workers that have yet to register.
    """

    def __init__(self, settle_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Start settling; within `settle_s` seconds every live worker sends a message."""
        self._settle_s = settle_s
        self._clock = clock
        self._ticked = clock()
        self._until = self._ticked + settle_s

    def tick(self) -> None:
        """Look at the clock; call it repeatedly, well within `HELD_UP_S`."""
        now = self._clock()
        if now - self._ticked > HELD_UP_S:
            self._until = now + self._settle_s
        self._ticked = now

    def __bool__(self) -> bool:
        self.tick()
        return self._clock() < self._until
