"""Background tasks whose failure is logged."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine

log = logging.getLogger(__name__)


def spawn(work: Coroutine[None, None, None], name: str) -> asyncio.Task[None]:
    """Run `work`, which never ends by itself; a bug that ends it is logged when it happens."""
    task = asyncio.create_task(work, name=name)
    task.add_done_callback(_complain)
    return task


async def stop(task: asyncio.Task[None]) -> None:
    """Cancel the task and wait for its end. Does not raise what it ended with before: that was logged."""
    task.cancel()
    await asyncio.wait({task})


def _complain(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception():
        log.critical("%s ended by a bug", task.get_name(), exc_info=task.exception())
