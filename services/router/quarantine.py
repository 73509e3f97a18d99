"""Try a router's suspects (requests under which an engine failed) alone, one after another.

The suspect with the shortest trial goes first, but a long one waits only for suspects that come soon after
it. All are tried on one worker while that works, to disturb few other requests: preferably on the worker
whose engine failed, if it goes on, because it is empty. The relay enforces a waiting request's deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import time
from collections.abc import AsyncIterator

from baton.protos import scheduler_pb2
from baton.scheduler.client import Placement
from baton.services.router.recovery import Failure, Trouble
from baton.services.router.state import RequestState

STEP_COSTS = 16  # generating a token costs as much as prefilling this many
A_SECOND = 1000  # a trial lets shorter ones overtake that come up to a second later, per this many tokens
MOST_S = 3.0  # the most by which a later trial may overtake
KEPT_S = 30.0  # how long after a trial its worker is used for the next one
# After this the next suspect is sent too. The worker admits suspects one at a time, and sends a long one back
# if another waits. A trial may not have begun by then: its grammar compiles, or there is no room.
TURN_S = 2.0

_Turn = tuple[float, int, asyncio.Future[None]]


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

    def worker_for(self, placement: Placement, state: RequestState) -> scheduler_pb2.Worker | None:
        """Return the worker on which suspects are tried, if it can take this one.

        It must have the request's weights, and no adapter unless the request is placed there. A worker that
        just failed this request is not used.
        """
        worker = self._worker
        if worker is None or time.monotonic() > self._until or worker.worker_id in state.excluded:
            return None
        if any(one is not None and one.worker_id == worker.worker_id for one in _workers(placement)):
            return worker
        alike = worker.model_fingerprint == placement.decode.model_fingerprint
        return worker if alike and state.adapter is None else None

    def use(self, worker: scheduler_pb2.Worker) -> None:
        """Try suspects on this worker for a while."""
        self._worker, self._until = worker, time.monotonic() + KEPT_S

    def note(self, failure: Failure, placement: Placement, state: RequestState) -> None:
        """Choose the worker for a suspect's trial, given the failure of its last attempt."""
        if failure.engine_goes_on:
            for worker in _workers(placement):
                if worker is not None and worker.worker_id == failure.worker_id:
                    self.use(worker)
            return
        if self._worker is not None and self._worker.worker_id == failure.worker_id:
            self._worker = None
        if failure.trouble not in (Trouble.REFUSED, Trouble.FULL, Trouble.STALE):
            state.excluded.add(failure.worker_id)

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
