"""What the router knows of the cluster as a whole: for /health, and for the model's limits at start."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass

from baton.protos import scheduler_pb2 as pb
from baton.scheduler.client import SchedulerClient
from baton.scheduler.errors import SchedulerError

FRESH_S = 0.5  # a description is good for this long: health checks must not load the scheduler
POLL_S = 0.5


@dataclass(frozen=True)
class Health:
    """Whether a request could be placed now; if not, why, in one line."""

    ok: bool
    reason: str = ""


class ClusterView:
    """Asks the scheduler who is there, seldom."""

    def __init__(self, client: SchedulerClient) -> None:
        self._client = client
        self._health = Health(ok=False, reason="the scheduler was not asked yet")
        self._known_until = 0.0  # time.monotonic
        self._asking = asyncio.Lock()

    async def health(self) -> Health:
        """Good while a decode or mixed worker is ready: a decode worker reads prompts too where it must.

        Bounded by the deadline of one call.
        """
        async with self._asking:
            if time.monotonic() >= self._known_until:
                self._health = await self._ask()
                self._known_until = time.monotonic() + FRESH_S
            return self._health

    async def capacity(self) -> pb.Capacity | None:
        """That of a ready worker that writes answers; None when there is none, or nobody to ask."""
        try:
            workers = _ready((await self._client.describe()).workers)
        except SchedulerError:
            return None
        writers = [worker for worker in workers if worker.identity.role != pb.ROLE_PREFILL]
        return writers[0].identity.capacity if writers else None

    async def first_capacity(self) -> pb.Capacity:
        """The same, as soon as there is one. For a task of its own: it waits for as long as it takes."""
        while True:
            if capacity := await self.capacity():
                return capacity
            await asyncio.sleep(POLL_S)

    async def _ask(self) -> Health:
        try:
            description = await self._client.describe()
        except SchedulerError as error:
            return Health(ok=False, reason=str(error))
        if any(worker.identity.role != pb.ROLE_PREFILL for worker in _ready(description.workers)):
            return Health(ok=True)
        return Health(ok=False, reason="no worker that writes answers (decode or mixed) is ready")


def _ready(workers: Iterable[pb.WorkerStatus]) -> list[pb.WorkerStatus]:
    return [one for one in workers if one.state == pb.WORKER_STATE_READY]
