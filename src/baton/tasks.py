"""Background tasks whose failure is logged, and calls that end in time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from contextvars import Context
from typing import Any, TypeVar

# A call is given up after this many looks at it, not after one timer: if this process itself was held up (0.4
# s was seen on a machine with five busy processes per core), timer and reply come due at once.
LOOKS = 4

T = TypeVar("T")

log = logging.getLogger(__name__)


def spawn(work: Coroutine[None, None, None], name: str) -> asyncio.Task[None]:
    """Run `work`, which never ends by itself; if a bug ends it, log that at once."""
    task = spawn_apart(work, name)
    task.add_done_callback(_complain)
    return task


def spawn_apart(work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
    """Run `work` outside the context of the request that happens to start it.

    A task that outlives its request would keep everything that the request's context variables hold, and its
    log lines would name that request forever.
    """
    return asyncio.create_task(work, name=name, context=Context())


async def stop(task: asyncio.Task[None]) -> None:
    """Cancel the task and wait for its end. Does not raise its earlier exception, which was logged."""
    task.cancel()
    await asyncio.wait({task})


async def patiently(call: Coroutine[Any, Any, T], timeout_s: float) -> T:
    """Return the outcome of a call of another process. Raises TimeoutError when it takes too long."""
    task = asyncio.create_task(call)
    try:
        for _ in range(LOOKS):
            await asyncio.wait({task}, timeout=timeout_s / LOOKS)
            if task.done():
                return task.result()
        raise TimeoutError
    finally:
        if not task.done():
            task.cancel()  # the client drops the connection, so that no late reply is taken for another's
            await asyncio.wait({task})


def _complain(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception():
        log.critical("%s ended by a bug", task.get_name(), exc_info=task.exception())
