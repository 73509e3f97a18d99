"""Run background tasks permanently: if a bug ends one, log the exception and restart it.

Otherwise a loop would end silently. For example, revoked keys would stay valid, and leases would never
expire.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine
from contextvars import Context

PAUSE_S = 1.0  # pause before a restart; doubles with each failure
MOST_PAUSE_S = 60.0
CALM_S = 60.0  # time without a failure after which pauses are short again

log = logging.getLogger(__name__)


def keep(work: Callable[[], Coroutine[None, None, None]], name: str) -> asyncio.Task[None]:
    """Run `work` in a task, outside the current context, until it returns; start it again if it raises."""
    return asyncio.create_task(_kept(work, name), name=name, context=Context())


def keep_thread(work: Callable[[], None], name: str) -> threading.Thread:
    """Return a daemon thread that runs `work` until it returns, and again if it raises."""
    return threading.Thread(target=_kept_thread, args=(work, name), name=name, daemon=True)


async def _kept(work: Callable[[], Coroutine[None, None, None]], name: str) -> None:
    pauses = _Pauses(name)
    while True:
        try:
            await work()
        except asyncio.CancelledError:
            # If nobody asked to cancel this task, a task that `work` awaited was cancelled.
            if (task := asyncio.current_task()) is None or task.cancelling():
                raise
            await asyncio.sleep(pauses.next())
        except Exception:  # noqa: BLE001 (logged, whatever it is)
            await asyncio.sleep(pauses.next())
        else:
            return


def _kept_thread(work: Callable[[], None], name: str) -> None:
    pauses = _Pauses(name)
    while True:
        try:
            work()
        except Exception:  # noqa: BLE001 (logged, whatever it is)
            time.sleep(pauses.next())
        else:
            return


class _Pauses:
    def __init__(self, name: str) -> None:
        self._name = name
        self._next_s = PAUSE_S
        self._failed_at = 0.0

    def next(self) -> float:
        """Log the exception being handled; return the seconds to wait."""
        now = time.monotonic()
        if now - self._failed_at > CALM_S + self._next_s:
            self._next_s = PAUSE_S
        self._failed_at = now
        pause_s, self._next_s = self._next_s, min(2 * self._next_s, MOST_PAUSE_S)
        log.critical("%s failed because of a bug; restarting it in %g s", self._name, pause_s, exc_info=True)
        return pause_s
