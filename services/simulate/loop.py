"""An event loop on virtual time: when nothing is ready to run, time jumps to the next timer.

asyncio's tasks, locks and timeouts run on it unchanged, as does all code that reads `loop.time`.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Stalled(RuntimeError):
    """A task waits for something that cannot happen, as no timer is left."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """The loop. `time` begins at 0 seconds."""

    def __init__(self) -> None:
        self._now = 0.0
        super().__init__(_Skipping(self))

    def time(self) -> float:
        """Return the virtual time."""
        return self._now

    def skip(self, seconds: float) -> None:
        """Advance the virtual time."""
        self._now += seconds


class _Skipping(selectors.SelectSelector):
    """A selector that never waits: there is no input but the loop's own pipe."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Skip to the next timer. Raises Stalled without one."""
        if timeout is None:
            raise Stalled("nothing is left that could ever happen, and not all is done")
        self._loop.skip(max(0.0, timeout))
        return []


def run(main: Coroutine[Any, Any, T], loop: VirtualLoop) -> T:
    """Run `main` on virtual time and close the loop. Raises Stalled, and whatever `main` raises."""
    try:
        return loop.run_until_complete(main)
    finally:
        loop.close()
