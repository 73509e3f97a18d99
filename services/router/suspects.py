"""Isolate suspects (requests that were running when an engine failed), and refuse repeats of convicted ones.

`Suspicion` decides when a request is tried alone in an engine, for how long, and when it is convicted.
`Quarantine` tries a router's suspects one after another, on one worker as long as it works: preferably on the
worker whose engine failed, if the engine continues, because it is empty. The shortest trial goes first, but a
long trial waits only for suspects that come soon after it. `Convicts` refuses repeats; each process has its
own, in memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import dataclass, field

from baton.protos import scheduler_pb2
from baton.scheduler.client import Placement
from baton.scheduler.need import Adapter
from baton.services.router.errors import Convicted
from baton.services.router.recovery import PROGRESS_TOKENS, Failure, Toll, Trouble

log = logging.getLogger(__name__)

# Workers that a request may lose in a row, without progress, before it is tried alone.
LOSSES_IN_BATCH = 2
# Tokens that a suspect generates alone, past the point where the engine failed, before it is batched with
# other requests again: enough for a prefill step and at least one decode step with drafts. Each further
# failure in a batch makes the next trial LONGER times as long.
TRIAL_TOKENS, LONGER = 4, 4
# After this many tokens in a batch, a failure that the engine survived is forgotten.
FORGET_TOKENS = 32
MOST_CONVICTS = 1024  # beyond it the oldest is dropped
CONVICTED_S = 600.0
STEP_COSTS = 16  # generating a token costs as much as prefilling this many tokens
A_SECOND = 1000  # a trial may overtake one that is this many tokens longer and came up to 1 s earlier
MOST_S = 3.0  # a trial overtakes only trials that came at most this much earlier
KEPT_S = 30.0  # how long after a trial its worker is used for the next one
# After this the next suspect is sent, too. The worker admits suspects one at a time, and sends a long one
# back if another is waiting. A trial may not have begun by then: its grammar is compiling, or there is no
# room.
TURN_S = 2.0

_Turn = tuple[float, int, asyncio.Future[None]]


@dataclass(slots=True)
class Suspicion:
    """The failures held against a request.

    A suspect is tried alone. If the engine reports a failure then, the request is convicted. Two requests
    that fail an engine only together both pass their trials, so each further failure in a batch makes the
    next trial longer, and a request under which two engines died runs alone to its end. A failure that the
    engine survived is forgotten with progress: otherwise one client's failing requests would make all others
    run alone.

    Losing a worker silently is weak evidence. Two losses in a row make a suspect, which protects the
    requests in the same batch, but losses never convict.
    """

    suspect: bool = False
    ends: int = 0  # engines that died, or pairs of workers lost, while it was in a batch
    failures: int = 0  # since the last progress, in a batch: failures that the engine survived
    losses: Toll = field(default_factory=Toll)  # workers lost in a row, without progress
    convicted: bool = False

    @property
    def to_its_end(self) -> bool:
        return self.ends > 1

    def trial_tokens(self, left: int) -> int:
        """Return how many of the `left` tokens to generate alone."""
        failures = self.ends + self.failures
        return left if self.to_its_end else min(left, TRIAL_TOKENS * LONGER ** max(0, failures - 1))

    def note(self, failure: Failure, *, alone: bool, generated: int) -> None:
        """Record a failed attempt after `generated` tokens. alone: no other request was in the engine."""
        if generated >= PROGRESS_TOKENS:
            self.losses.clear()
        if generated >= FORGET_TOKENS and not alone:
            self.failures = 0
        if failure.trouble is Trouble.ENGINE:
            self.convicted = alone
            self.suspect = True
            self.failures += not alone and failure.engine_goes_on
            self.ends += not alone and not failure.engine_goes_on
        elif failure.trouble is Trouble.LOST and not alone:
            self.losses.add(failure.worker_id)
            if len(self.losses) >= LOSSES_IN_BATCH:
                self.suspect = True
                self.ends += 1

    def passed(self) -> None:
        self.suspect = self.to_its_end
        self.losses.clear()


class Quarantine:
    """The suspects of one router. Not thread-safe."""

    def __init__(self) -> None:
        self._waiting: list[_Turn] = []  # a heap
        self._numbers = itertools.count()
        self._now: _Turn | None = None
        self._worker: scheduler_pb2.Worker | None = None
        self._until = 0.0  # time.monotonic

    @property
    def more(self) -> bool:
        return bool(self._waiting)

    def worker_for(
        self, placement: Placement, excluded: Collection[str], adapter: Adapter | None
    ) -> scheduler_pb2.Worker | None:
        """Return the worker on which suspects are tried, if it can take this one.

        It can if the request is placed there, or if it has the request's weights and the request needs no
        adapter. A worker that just failed this request is not used.
        """
        worker = self._worker
        if worker is None or time.monotonic() > self._until or worker.worker_id in excluded:
            return None
        if any(one is not None and one.worker_id == worker.worker_id for one in _workers(placement)):
            return worker
        alike = worker.model_fingerprint == placement.decode.model_fingerprint
        return worker if alike and adapter is None else None

    def use(self, worker: scheduler_pb2.Worker) -> None:
        self._worker, self._until = worker, time.monotonic() + KEPT_S

    def note(self, failure: Failure, placement: Placement, excluded: set[str]) -> None:
        """Choose the worker for a suspect's trial, given the failure of its last attempt."""
        if failure.engine_goes_on:
            for worker in _workers(placement):
                if worker is not None and worker.worker_id == failure.worker_id:
                    self.use(worker)
            return
        if self._worker is not None and self._worker.worker_id == failure.worker_id:
            self._worker = None
        if failure.trouble not in (Trouble.REFUSED, Trouble.FULL, Trouble.STALE, Trouble.MEDIA):
            excluded.add(failure.worker_id)

    @contextlib.asynccontextmanager
    async def turn(self, computes: int, generates: int) -> AsyncIterator[None]:
        """Wait for a turn. computes, generates: the trial's tokens to prefill and to generate."""
        loop = asyncio.get_running_loop()
        size_s = min(MOST_S, (computes + STEP_COSTS * generates) / A_SECOND)
        turn = round(time.monotonic() + size_s, 1), next(self._numbers), loop.create_future()
        heapq.heappush(self._waiting, turn)
        loop.call_soon(self._next)  # requests that failed with it join in the same loop iteration
        try:
            await turn[2]
            yield
        finally:
            if turn in self._waiting:
                self._waiting.remove(turn)
                heapq.heapify(self._waiting)
            else:
                loop.call_soon(self._over, turn)

    def _next(self) -> None:
        if self._waiting and self._now is None:
            self._now = heapq.heappop(self._waiting)
            asyncio.get_running_loop().call_later(TURN_S, self._over, self._now)
            begins = self._now[2]
            if not begins.done():
                begins.set_result(None)

    def _over(self, turn: _Turn) -> None:
        if self._now is turn:
            self._now = None
            self._next()


def _workers(placement: Placement) -> tuple[scheduler_pb2.Worker | None, ...]:
    return placement.prefill, placement.decode


class Convicts:
    def __init__(
        self,
        digest: Callable[[bytes], bytes],
        shape: Callable[[bytes], str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """digest: equal for equal requests; shape: describes a request in the log without its content."""
        self._digest = digest
        self._shape = shape
        self._clock = clock
        self._until: OrderedDict[bytes, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._until)

    def add(self, request_id: str, engine_request: bytes, why: str) -> None:
        told = f"request {request_id} failed an engine alone: {why}; {self._shape(engine_request)}"
        log.error("%s", told, extra={"request_id": request_id})
        digest = self._digest(engine_request)
        self._until[digest] = self._clock() + CONVICTED_S
        self._until.move_to_end(digest)
        while len(self._until) > MOST_CONVICTS:
            self._until.popitem(last=False)

    def check(self, engine_request: bytes) -> None:
        """Raise Convicted for a repeated request. Costs nothing while the table is empty."""
        if not self._until:
            return
        now = self._clock()
        while self._until:
            oldest = next(iter(self._until))
            if self._until[oldest] > now:
                break
            del self._until[oldest]
        until = self._until.get(self._digest(engine_request))
        if until is not None:
            raise Convicted(
                "the same request made an engine fail a short while ago, alone: it is not tried again for "
                f"{until - now:.0f} s; change the request, or ask the operator to look into the router's log",
                retry_after_s=until - now,
            )
