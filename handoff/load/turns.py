"""The queue of a rank's pulls: few run at once, and an unresponsive source does not block the others.

More concurrent pulls would share the memory bus and the engine's cores, and all would end later. If a network
is cut, a pull stalls for seconds until its connection is found dead. A stalled pull does not count, so pulls
from other sources overtake it; pulls from the same source wait. Early pulls mostly wait for the next step at
the source and have a queue of their own.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Generic, Protocol, TypeVar

MOVING = 2  # concurrent pulls that make progress
STALLED_S = 1.0  # time without a byte after which a pull is stalled; even slow networks bring some
THREADS = 8  # MOVING pulls, and the stalled ones of three sources
EARLY = 4  # concurrent early pulls; each also holds a thread at the source
_LOOK_S = STALLED_S / 4  # interval of checks for stalled pulls while others wait


class Pulling(Protocol):
    """A load, as the queue sees it."""

    @property
    def source(self) -> str:
        """The worker that saved the KV."""

    heard_s: float  # time.monotonic of the start, or of the last bytes


P = TypeVar("P", bound=Pulling)


class Turns(Generic[P]):
    """Waiting and running pulls. Thread-safe."""

    def __init__(self, moving: int = MOVING, stalled_s: float = STALLED_S) -> None:
        self._moving = moving
        self._stalled_s = stalled_s
        self._waiting: deque[P] = deque()  # oldest first
        self._begun: list[P] = []
        self._changed = threading.Condition()
        self._closed = False

    def add(self, load: P) -> None:
        with self._changed:
            self._waiting.append(load)
            self._changed.notify()

    def leave(self, load: P) -> bool:
        """Leave the queue. Return False for a load that has begun."""
        with self._changed:
            waits = load in self._waiting
            if waits:
                self._waiting.remove(load)
            return waits

    def take(self) -> P | None:
        """Wait for the next load that may begin; return None once closed and empty."""
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
