"""What the router knows of the cluster as a whole: for placing alone, for /health, for the model's limits."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass

from baton.protos import scheduler_pb2 as pb
from baton.scheduler.client import SchedulerClient
from baton.scheduler.errors import SchedulerError

FRESH_S = 0.5  # a snapshot is good for this long: health checks must not load the scheduler
POLL_S = 1.0  # s between snapshots
POLL_AWAY_S = 0.25  # while nobody answers: how soon a scheduler that is back is asked again

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Health:
    """Whether a request could be placed now; if not, why, in one line."""

    ok: bool
    reason: str = ""


class ClusterView:
    """Keeps the client's snapshot of the cluster young, and reads it."""

    def __init__(self, client: SchedulerClient, worker_lease_s: float) -> None:
        self._client = client
        # A worker's lease, and as much again for a scheduler that is away for a moment.
        self._heard_s = 2 * worker_lease_s
        self._problem = "the scheduler was not asked yet"  # empty: it answered the last time
        self._asked_at = 0.0  # time.monotonic
        self._asking = asyncio.Lock()

    async def watch(self) -> None:
        """Take snapshots, again and again. For a task of its own: it never ends."""
        while True:
            await self._ask(oldest=time.monotonic())
            await asyncio.sleep(POLL_S if self._client.answering else POLL_AWAY_S)

    async def health(self) -> Health:
        """Good while a worker is ready: each side does it all where the other one is lost.

        With the scheduler away the last snapshot counts, as for placements. Bounded by one call's deadline.
        """
        if self._client.answering:
            await self._ask(oldest=time.monotonic() - FRESH_S)
        if _ready(self._client.standby.workers):
            return Health(ok=True)
        return Health(ok=False, reason=self._problem or "no worker is ready")

    def capacity(self) -> pb.Capacity | None:
        """That of a ready worker; None when none is known."""
        ready = _ready(self._client.standby.workers)
        return ready[0].identity.capacity if ready else None

    def heard(self) -> list[pb.WorkerStatus]:
        """The workers whose last heartbeat still says something of now. From any thread."""
        return self._client.standby.heard(self._heard_s)

    async def first_capacity(self) -> pb.Capacity:
        """The same, as soon as there is one. For a task of its own: it waits for as long as it takes."""
        while True:
            if capacity := self.capacity():
                return capacity
            await asyncio.sleep(FRESH_S)

    async def _ask(self, *, oldest: float) -> None:
        async with self._asking:
            if self._asked_at >= oldest:
                return
            try:
                await self._client.refresh()
            except SchedulerError as error:
                if not self._problem:
                    log.warning("placing from the last snapshot: %s", error)
                self._problem = str(error)
            else:
                self._problem = ""
            self._asked_at = time.monotonic()


def _ready(workers: Iterable[pb.WorkerStatus]) -> list[pb.WorkerStatus]:
    return [one for one in workers if one.state == pb.WORKER_STATE_READY]
