"""An event loop on virtual time: when nothing is ready to run, the next timer's moment is now.

asyncio's own code runs on it unchanged (tasks, locks, timeouts), and so does whatever reads `loop.time`.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Stalled(RuntimeError):
    """Something waits for what can never come: no timer is left."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """The loop. `time` begins at 0, seconds."""

    def __init__(self) -> None:
        self._now = 0.0
        super().__init__(_Skipping(self))

    def time(self) -> float:
        """Return the virtual time."""
        return self._now

    def skip(self, seconds: float) -> None:
        """Let so much time pass at once."""
        self._now += seconds


class _Skipping(selectors.SelectSelector):
    """A selector whose wait takes no time, and no input ends: there is none but the loop's own pipe."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Skip the time until the next timer. Raises Stalled without one."""
        if timeout is None:
            raise Stalled("nothing is left that could ever happen, and not all is done")
        self._loop.skip(max(0.0, timeout))
        return []


def run(main: Coroutine[Any, Any, T], loop: VirtualLoop) -> T:
    """Run `main` on virtual time and close the loop. Raises what it raises, and Stalled."""
    try:
        return loop.run_until_complete(main)
    finally:
        loop.close()
