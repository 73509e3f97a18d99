"""Background tasks whose failures are logged, and calls with a timeout."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from contextvars import Context
from typing import Any, TypeVar

# A timeout is this many short waits, not one. If this process itself was held up (0.4 s with five busy
# processes per core), its timer and the reply are both due, and the reply must win.
LOOKS = 4

T = TypeVar("T")

log = logging.getLogger(__name__)


def spawn(work: Coroutine[None, None, None], name: str) -> asyncio.Task[None]:
    """Run `work` in a task; log an exception at once."""
    task = spawn_apart(work, name)
    task.add_done_callback(_complain)
    return task


def spawn_apart(work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
    """Run `work` in a task outside the current context.

    A task that outlives the request that started it would keep its context variables alive, and log under its
    id.
    """
    return asyncio.create_task(work, name=name, context=Context())


async def stop(task: asyncio.Task[None]) -> None:
    """Cancel a task and wait for its end. Does not raise its exception."""
    task.cancel()
    await asyncio.wait({task})


async def patiently(call: Coroutine[Any, Any, T], timeout_s: float) -> T:
    """Return the result of a call to another process. Raises TimeoutError."""
    task = asyncio.create_task(call)
    try:
        for _ in range(LOOKS):
            await asyncio.wait({task}, timeout=timeout_s / LOOKS)
            if task.done():
                return task.result()
        raise TimeoutError
    finally:
        if not task.done():
            task.cancel()  # clients then drop the connection, so a late reply cannot be taken for another
            await asyncio.wait({task})


def _complain(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception():
        log.critical("%s ended by a bug", task.get_name(), exc_info=task.exception())
