"""When a scheduler may not have heard of all workers again."""

from __future__ import annotations

import time
from collections.abc import Callable

HELD_UP_S = 2.0  # s without a tick: this process was stopped or starved, and leases may have run out unheard


class Settling:
    """True for a while after the start, after the process was held up, and `again` when it is told so:
    workers are heard of again first.

    Rejections of that time are not the last word: routers may know workers that are still to register.
    """

    def __init__(self, settle_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`settle_s`: within this time every worker that lives is heard of."""
        self._settle_s = settle_s
        self._clock = clock
        self._ticked = clock()
        self._until = self._ticked + settle_s

    def again(self) -> None:
        """From now on, for as long as after the start."""
        self._until = self._clock() + self._settle_s

    def tick(self) -> None:
        """To be called well within `HELD_UP_S`, again and again."""
        now = self._clock()
        if now - self._ticked > HELD_UP_S:
            self._until = now + self._settle_s
        self._ticked = now

    def __bool__(self) -> bool:
        self.tick()
        return self._clock() < self._until
