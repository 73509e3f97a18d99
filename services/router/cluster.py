"""The router's view of the cluster: for placing without a scheduler, /health and the model's limits."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from baton.protos import scheduler_pb2 as pb
from baton.scheduler.client import SchedulerClient
from baton.scheduler.errors import SchedulerError

FRESH_S = 0.5  # a snapshot is good for this long: health checks must not load the scheduler
POLL_S = 1.0  # s between snapshots
POLL_AWAY_S = 0.25  # while no scheduler answers: one that is back is noticed soon

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Health:
    """Whether a request could be placed now; if not, the reason in one line."""

    ok: bool
    reason: str = ""


class ClusterView:
    """Keeps the client's snapshot of the cluster fresh, and answers from it."""

    def __init__(self, client: SchedulerClient, worker_lease_s: float) -> None:
        self._client = client
        # A worker's lease, and as much again for a scheduler that is away for a moment.
        self._heard_s = 2 * worker_lease_s
        self._problem = "no call to the scheduler was made yet"  # empty: it answered the last one
        self._refreshed_at = 0.0  # time.monotonic
        self._refreshing = asyncio.Lock()
        self._load: Callable[[], pb.RouterLoad] | None = None

    def tell(self, load: Callable[[], pb.RouterLoad]) -> None:
        """Tell the scheduler, with each snapshot that is asked for, what `load` returns then."""
        self._load = load

    async def watch(self) -> None:
        """Take snapshots forever. To be run as a task of its own."""
        while True:
            await self._refresh(oldest=time.monotonic())
            await asyncio.sleep(POLL_S if self._client.answering else POLL_AWAY_S)

    async def health(self) -> Health:
        """Tell whether a worker is ready: either role alone can serve where the other one is lost.

        While no scheduler answers the last snapshot counts, as for placements. Returns within one call's
        deadline.
        """
        if self._client.answering:
            await self._refresh(oldest=time.monotonic() - FRESH_S)
        if _ready(self._client.standby.workers):
            return Health(ok=True)
        return Health(ok=False, reason=self._problem or "no worker is ready")

    def capacity(self) -> pb.Capacity | None:
        """Return the capacity of a ready worker; None while there is none."""
        ready = _ready(self._client.standby.workers)
        return ready[0].identity.capacity if ready else None

    def heard(self) -> list[pb.WorkerStatus]:
        """Return the workers whose last heartbeat is recent. Thread-safe."""
        return self._client.standby.heard(self._heard_s)

    async def first_capacity(self) -> pb.Capacity:
        """Wait for a ready worker, however long it takes, and return its capacity."""
        while True:
            if capacity := self.capacity():
                return capacity
            await asyncio.sleep(FRESH_S)

    async def _refresh(self, *, oldest: float) -> None:
        """Take a snapshot, unless there is one since `oldest` (time.monotonic)."""
        async with self._refreshing:
            if self._refreshed_at >= oldest:
                return
            try:
                await self._client.refresh(self._load() if self._load else None)
            except SchedulerError as error:
                if not self._problem:
                    log.warning("placing from the last snapshot: %s", error)
                self._problem = str(error)
            else:
                self._problem = ""
            self._refreshed_at = time.monotonic()


def _ready(workers: Iterable[pb.WorkerStatus]) -> list[pb.WorkerStatus]:
    return [worker for worker in workers if worker.state == pb.WORKER_STATE_READY]
