"""The order of a rank's pulls: few at once, and none that waits behind a source that does not answer.

More pulls at once share the same memory bus and the engine's cores, so that all end later. But one whose wire
is cut moves nothing until its connection is found dead, seconds later: it counts as none, and what comes from
other sources goes past it. What comes from the same source waits, as it would wait on the same connection.

Pulls from prompts that are still computed mostly wait for the next step there: they have turns of their own.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Generic, Protocol, TypeVar

MOVING = 2  # pulls at once that bring something
STALLED_S = 1.0  # without a byte, from the begin or the last ones: a slow wire brings some within that
THREADS = 8  # MOVING pulls, and the stalled ones of three sources
EARLY = 4  # pulls at once from prompts that are still computed; each holds a thread there, too
_LOOK_S = STALLED_S / 4  # between looks for pulls that have stalled, while others wait


class Pulling(Protocol):
    """A load, as far as its turn is concerned."""

    @property
    def source(self) -> str:
        """The worker that saved the KV."""

    heard_s: float  # time.monotonic; when it began, or bytes came last


P = TypeVar("P", bound=Pulling)


class Turns(Generic[P]):
    """The loads that wait, and those that have a turn. Safe for any thread."""

    def __init__(self, moving: int = MOVING, stalled_s: float = STALLED_S) -> None:
        """Begin with none.

        moving: pulls at once that bring something; stalled_s: without a byte, until one counts no more.
        """
        self._moving = moving
        self._stalled_s = stalled_s
        self._waiting: deque[P] = deque()  # oldest first
        self._begun: list[P] = []
        self._changed = threading.Condition()
        self._closed = False

    def add(self, load: P) -> None:
        """Queue a load."""
        with self._changed:
            self._waiting.append(load)
            self._changed.notify()

    def leave(self, load: P) -> bool:
        """Give a place in the queue up. Return False for a load that has begun."""
        with self._changed:
            waits = load in self._waiting
            if waits:
                self._waiting.remove(load)
            return waits

    def take(self) -> P | None:
        """Wait for the next load whose turn it is, and begin it; None when closed and none waits any more."""
        with self._changed:
            while not (self._closed and not self._waiting):
                if (load := self._next()) is not None:
                    self._waiting.remove(load)
                    load.heard_s = time.monotonic()
                    self._begun.append(load)
                    return load
                self._changed.wait(_LOOK_S if self._waiting else None)
            return None

    def over(self, load: P) -> None:
        """End a turn."""
        with self._changed:
            self._begun.remove(load)
            self._changed.notify_all()

    def close(self) -> None:
        """Let `take` return None once nothing waits."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _next(self) -> P | None:
        latest = time.monotonic() - self._stalled_s
        stalled = [load for load in self._begun if load.heard_s < latest]
        if len(self._begun) - len(stalled) >= self._moving:
            return None
        silent = {load.source for load in stalled}
        return next((load for load in self._waiting if load.source not in silent), None)
