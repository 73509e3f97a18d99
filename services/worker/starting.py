"""Start a worker's or limb's process: end it on signals, and wait for its slow steps."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from baton import signals
from baton.services.errors import StartError
from baton.services.worker.gang import WorkerGang

logger = logging.getLogger(__name__)

T = TypeVar("T")

PROGRESS_EVERY_S = 10.0
LOADING_S = 1800.0  # limit in a gang: vLLM's ranks wait for each other without a limit
CAUSE_S = 1.0  # time to notice the end of a member, which may have made the work here fail


class Stopped(Exception):
    """A signal ended the process before it served."""


def stop_on_signals() -> asyncio.Event:
    """Return an event that a signal sets. A second SIGTERM or SIGINT ends the process at once."""
    stop = asyncio.Event()
    told: list[int] = []

    def on_signal(number: int) -> None:
        if number in signals.HURRYING:
            if told:
                os._exit(128 + number)
            told.append(number)
        stop.set()

    for number in signals.ending():
        asyncio.get_running_loop().add_signal_handler(number, on_signal, number)
    return stop


async def preloaded(preload: Callable[[], None]) -> None:
    # A thread of its own, because closing the loop would wait for threads of its default executor.
    await asyncio.get_running_loop().run_in_executor(ThreadPoolExecutor(1, "preload"), preload)


async def unless_stopped(step: Awaitable[T], what: str, stop: asyncio.Event, gang: WorkerGang | None) -> T:
    """Return the step's result, logging progress; cancel it and raise Stopped if `stop` is set first.

    Raises SiblingLost if the gang ends first, or just after the step has failed, and StartError if a gang
    takes longer than LOADING_S.
    """
    began, work = time.monotonic(), asyncio.ensure_future(step)
    stopping = asyncio.create_task(stop.wait())
    waited: list[asyncio.Future[Any]] = [work, stopping]
    if gang is not None:
        waited.append(gang.link.lost)
    while not (await asyncio.wait(waited, timeout=PROGRESS_EVERY_S, return_when=asyncio.FIRST_COMPLETED))[0]:
        if gang is not None and time.monotonic() - began > LOADING_S:
            stopping.cancel()
            raise StartError(
                f"still {what} after {LOADING_S:g} s: if the gang is on several machines, see whether all "
                "ports between them are open"
            )
        missing = gang.link.missing if gang is not None else ""
        logger.info("still %s%s, %.0f s", what, missing and f": rank {missing}", time.monotonic() - began)
    stopping.cancel()
    if not work.done():
        if gang is not None:
            gang.check()
        logger.info("ended by a signal while %s", what)
        work.cancel()
        raise Stopped
    if gang is not None and (error := work.exception()):
        await asyncio.wait([gang.link.lost], timeout=CAUSE_S)
        if gang.link.lost.done():
            logger.error("failed while %s: %s", what, error)
        gang.check()
    return work.result()
