"""Watch the cluster from the router: for placing without a scheduler, /health and the model's limits."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Container, Iterable

from baton.levels import set_level
from baton.protos import scheduler_pb2 as pb
from baton.scheduler.client import SchedulerClient
from baton.scheduler.errors import SchedulerError
from baton.scheduler.members import Member, members

FRESH_S = 0.5  # /health reuses a snapshot for this long, to spare the scheduler
POLL_S = 1.0  # between two snapshots
POLL_AWAY_S = 0.25  # between two snapshots while no scheduler answers, to notice soon when one is back
HURRY_S, HURRY_POLL_S = 1.0, 0.1  # how long and how often to refresh after a placement on an unlisted worker

log = logging.getLogger(__name__)


class ClusterView:
    """Refreshes the scheduler client's snapshot of the cluster, and answers from it."""

    def __init__(
        self,
        client: SchedulerClient,
        worker_lease_s: float,
        reached: Callable[[], Container[str]] = tuple,
        lost: Callable[[], None] = lambda: None,
        level: Callable[[str], None] = set_level,
    ) -> None:
        """Watch the cluster through `client`; `lost` is called when the last scheduler stops answering.

        Workers that `reached` returns stay in the snapshot even if the scheduler has lost them. `level` is
        called with the log level that the scheduler sets for this process.
        """
        self._level = level
        self._client = client
        self._reached = reached
        self._lost = lost
        # Twice the lease, to bridge a short outage of the scheduler.
        self._heard_s = 2 * worker_lease_s
        # The error of the last call to a scheduler; empty if the call was answered.
        self.problem = "no call to the scheduler was made yet"
        self._answered = False  # a scheduler answered, and has not been lost since
        self._refreshed_at = 0.0  # time.monotonic
        self._refreshing = asyncio.Lock()
        self._known: set[str] = set()  # ids of ready workers
        self._missing: set[str] = set()  # ids of chosen workers that are not yet among the ready ones
        self._hurry_until = 0.0  # time.monotonic
        self._news = asyncio.Event()
        self._load: Callable[[], pb.RouterLoad] | None = None

    def tell(self, load: Callable[[], pb.RouterLoad]) -> None:
        """Report the result of `load` to the scheduler with each request for a snapshot."""
        self._load = load

    def chosen(self, worker_id: str) -> None:
        """Note that a scheduler chose a worker. If the snapshot lacks the worker, refresh soon.

        If the scheduler dies, the router has only its snapshot to place from.
        """
        if worker_id not in self._known and worker_id not in self._missing:
            self._missing.add(worker_id)
            self._hurry_until = time.monotonic() + HURRY_S
            self._news.set()

    async def watch(self) -> None:
        """Refresh the snapshot forever. Run it as a task."""
        while True:
            await self._refresh(oldest=time.monotonic())
            await asyncio.sleep(HURRY_POLL_S)
            self._missing -= self._known
            if self._missing and time.monotonic() < self._hurry_until:
                continue
            self._missing.clear()
            self._news.clear()
            interval_s = POLL_S if self._client.answering else POLL_AWAY_S
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(interval_s - HURRY_POLL_S):
                    await self._news.wait()

    async def health(self) -> str:
        """Return why no request can be placed now, or "" if one can. One ready worker of any role suffices.

        While no scheduler answers, the last snapshot counts, as for placements.
        """
        if self._client.answering:
            await self._refresh(oldest=time.monotonic() - FRESH_S)
        return "" if self.ready() else self.problem or "no worker is ready"

    def ready(self) -> int:
        """Return the number of ready workers in the last snapshot. Thread-safe."""
        return len(_ready(self._client.standby.workers))

    def heard(self) -> list[pb.WorkerStatus]:
        """Return the workers whose last heartbeat is recent. Thread-safe."""
        return self._client.standby.heard(self._heard_s)

    def members(self) -> list[Member]:
        """Return the processes in the last snapshot that serve metrics. Thread-safe."""
        known = self._client.standby
        return members((one.identity for one in known.workers), known.fleet.processes)

    async def first_capacity(self) -> pb.Capacity:
        """Wait for a ready worker, and return its capacity."""
        while True:
            if ready := _ready(self._client.standby.workers):
                return ready[0].identity.capacity
            await asyncio.sleep(FRESH_S)

    async def _refresh(self, *, oldest: float) -> None:
        """Refresh the snapshot unless it was taken after `oldest` (time.monotonic)."""
        async with self._refreshing:
            if self._refreshed_at >= oldest:
                return
            try:
                level = await self._client.refresh(self._load() if self._load else None, self._reached())
            except SchedulerError as error:
                if not self.problem:
                    log.warning("placing from the last snapshot: %s", error)
                self.problem = str(error)
                if self._answered and not self._client.answering:
                    self._answered = False
                    self._lost()
            else:
                self.problem = ""
                self._answered = True
                self._known = {one.identity.worker_id for one in _ready(self._client.standby.workers)}
                self._level(level)
            self._refreshed_at = time.monotonic()


def _ready(workers: Iterable[pb.WorkerStatus]) -> list[pb.WorkerStatus]:
    ready = (one for one in workers if one.state == pb.WORKER_STATE_READY)
    able = (one for one in ready if one.identity.HasField("capacity"))
    return [one for one in able if one.identity.role != pb.ROLE_ENCODE]
