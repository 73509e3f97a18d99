"""An asyncio event loop on virtual time: when nothing is ready to run, time jumps to the next timer."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Stalled(RuntimeError):
    """All tasks are waiting, and there is no timer."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time starts at 0."""

    def __init__(self) -> None:
        self._now = 0.0
        super().__init__(_Skipping(self))

    def time(self) -> float:
        return self._now

    def skip(self, seconds: float) -> None:
        self._now += seconds


class _Skipping(selectors.SelectSelector):
    """A selector that never blocks, as there is no input."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Advance the time to the next timer. Raises Stalled if there is none."""
        if timeout is None:
            raise Stalled("all tasks wait, and there is no timer")
        self._loop.skip(max(0.0, timeout))
        return []


def run(main: Coroutine[Any, Any, T], loop: VirtualLoop) -> T:
    """Run `main` on virtual time and close the loop. Raises Stalled, and whatever `main` raises."""
    try:
        return loop.run_until_complete(main)
    finally:
        loop.close()
