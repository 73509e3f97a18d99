"""Timers that share one thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable

from baton.keeping import keep_thread


class Deadlines:
    """Keep a few deadlines by key. Thread-safe."""

    def __init__(self, name: str) -> None:
        self._due: dict[Hashable, tuple[float, Callable[[], object]]] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._thread = keep_thread(self._watch, name)
        self._thread.start()

    def add(self, key: Hashable, when_s: float, call: Callable[[], object]) -> None:
        """Call `call` at `when_s` (CLOCK_MONOTONIC), unless the key is removed before."""
        with self._changed:
            self._due[key] = when_s, call
            self._changed.notify()

    def remove(self, key: Hashable) -> None:
        """Forget a deadline. Its call may be under way; an unknown key is ignored."""
        with self._changed:
            self._due.pop(key, None)

    def close(self) -> None:
        """Forget all deadlines, and end the thread. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _watch(self) -> None:
        while (call := self._next()) is not None:
            call()

    def _next(self) -> Callable[[], object] | None:
        """Wait for the next call that is due; return None when closed."""
        with self._changed:
            while not self._closed:
                key = min(self._due, key=lambda one: self._due[one][0], default=None)
                left_s = self._due[key][0] - time.monotonic() if key is not None else None
                if key is not None and left_s is not None and left_s <= 0:
                    return self._due.pop(key)[1]
                self._changed.wait(left_s)
            return None
