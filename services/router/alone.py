"""Keep stored Responses to a single router: one that stores them must be the only router of its models.

Only `ResponseStore` is concerned; "alone" here has nothing to do with requests or placements.

A second router refuses to start while the first one runs. If both start at once, or while no scheduler
answers, each closes its store when the scheduler reports the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from baton.keeping import keep
from baton.scheduler.client import SchedulerClient
from baton.scheduler.errors import SchedulerError
from baton.services.engine.isolation import RESPONSES_STORE
from baton.services.errors import StartError
from baton.tasks import stop

if TYPE_CHECKING:
    from baton.services.router.vllm.response_store import ResponseStore

log = logging.getLogger(__name__)

ALIVE_S = 3.0  # routers ask a scheduler once a second; one that is silent for longer has ended
START_S = 6.0  # time for a predecessor to end
LOOK_S = 2.0


@contextlib.asynccontextmanager
async def kept_alone(
    store: ResponseStore, schedulers: Sequence[SchedulerClient], router_id: str
) -> AsyncIterator[None]:
    """Inside the block, keep the store closed while another router of these models runs.

    Raises StartError if one runs now.
    """
    if not store.on:
        yield
        return
    loop = asyncio.get_running_loop()
    deadline = loop.time() + START_S
    while other := await _another(schedulers, router_id):
        if loop.time() > deadline:
            raise StartError(
                f"the environment variable {RESPONSES_STORE} is set, and {other} serves the same model: "
                "responses are stored in one router's memory; run one router, or unset the variable"
            )
        await asyncio.sleep(LOOK_S / 4)
    watching = keep(
        partial(_watch, store, schedulers, router_id), "other routers, for the store of responses"
    )
    try:
        yield
    finally:
        await stop(watching)


async def _watch(store: ResponseStore, schedulers: Sequence[SchedulerClient], router_id: str) -> None:
    while True:
        await asyncio.sleep(LOOK_S)
        other = await _another(schedulers, router_id)
        if other is not None and other != store.elsewhere:
            if other:
                log.error("%s serves the same model: the store of responses is closed until it ends", other)
            store.elsewhere = other


async def _another(schedulers: Sequence[SchedulerClient], router_id: str) -> str | None:
    """Return the id of another router; "" if there is none, None if no scheduler answers."""
    for scheduler in schedulers:
        try:
            description = await scheduler.describe()
        except SchedulerError:
            return None
        for one in description.routers:
            if one.router_id != router_id and one.heard_age_s < ALIVE_S:
                return str(one.router_id)
    return ""
