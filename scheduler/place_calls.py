"""The placements that a client asks of one scheduler: who asks during a call goes with the next, with others.

A call costs client and scheduler more than a placement does. At low rates each goes at once, in a call of its
own; the more there are, the more of them share one. A call that is not answered soon holds up nobody: the
next one follows it after `BEHIND_S`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from baton.protos import scheduler_pb2 as pb
from baton.scheduler.endpoints import Endpoint, Endpoints
from baton.scheduler.errors import Refused, SchedulerUnavailable
from baton.tasks import spawn, stop

PLACE_TIMEOUT_S = 3.0  # of a call
BEHIND_S = 0.005  # s; the longest wait for a call that is under way
MOST = 64  # placements in a call


@dataclass(frozen=True, slots=True)
class _Asked:
    need: pb.Need
    answer: asyncio.Future[pb.PlaceReply]


class PlaceCalls:
    """The placements that one client asks of one scheduler. For one event loop."""

    def __init__(
        self, schedulers: Endpoints, scheduler: Endpoint, on_unwanted: Callable[[pb.Placement], None]
    ) -> None:
        """Ask `scheduler`; `on_unwanted` gets placements of callers that had left when they came."""
        self._schedulers = schedulers
        self._scheduler = scheduler
        self._on_unwanted = on_unwanted
        self._waiting: deque[_Asked] = deque()
        self._calls: set[asyncio.Task[None]] = set()
        self._last: asyncio.Task[None] | None = None  # the call that others wait for
        self._timer: asyncio.TimerHandle | None = None  # until they do not wait any longer

    async def ask(self, need: pb.Need) -> pb.PlaceReply:
        """Return the reply. Raises SchedulerUnavailable, and Refused for a call that is not allowed."""
        loop = asyncio.get_running_loop()
        asked = _Asked(need, loop.create_future())
        self._waiting.append(asked)
        if self._last is None:
            self._begin()
        elif self._timer is None:
            self._timer = loop.call_later(BEHIND_S, self._begin)
        try:
            return await asked.answer
        except asyncio.CancelledError:
            if not (asked.answer.cancelled() or asked.answer.exception()):  # it came at the same moment
                self._unwanted(asked.answer.result())
            raise

    async def close(self) -> None:
        """Give up what is under way, and what waits."""
        _give_up(self._waiting)
        self._waiting.clear()
        self._stop_timer()
        for call in list(self._calls):
            await stop(call)

    def _begin(self) -> None:
        """Call with those that wait, as far as their callers still do."""
        self._stop_timer()
        batch: list[_Asked] = []
        while self._waiting and len(batch) < MOST:
            asked = self._waiting.popleft()
            if not asked.answer.done():
                batch.append(asked)
        if not batch:
            return
        self._last = spawn(self._call(batch), "placements")
        self._calls.add(self._last)
        self._last.add_done_callback(self._ended)
        if self._waiting:
            self._timer = asyncio.get_running_loop().call_later(BEHIND_S, self._begin)

    def _ended(self, call: asyncio.Task[None]) -> None:
        self._calls.discard(call)
        if call is self._last:
            self._last = None
            self._begin()

    async def _call(self, batch: Sequence[_Asked]) -> None:
        requests = pb.PlaceRequests(needs=[asked.need for asked in batch])
        try:
            found: pb.PlaceReplies = await self._schedulers.ask(
                self._scheduler, "PlaceAll", requests, PLACE_TIMEOUT_S
            )
            for asked, reply in zip(batch, found.replies, strict=True):
                if not asked.answer.done():
                    asked.answer.set_result(reply)
                else:
                    self._unwanted(reply)
        except (SchedulerUnavailable, Refused) as error:
            for asked in batch:
                if not asked.answer.done():
                    asked.answer.set_exception(type(error)(*error.args))
        finally:
            _give_up(batch)  # none, unless this task is cancelled, or ends by a bug

    def _unwanted(self, reply: pb.PlaceReply) -> None:
        if reply.HasField("placement"):
            self._on_unwanted(reply.placement)

    def _stop_timer(self) -> None:
        if self._timer:
            self._timer.cancel()
            self._timer = None


def _give_up(left: Iterable[_Asked]) -> None:
    for asked in left:
        if not asked.answer.done():
            asked.answer.set_exception(SchedulerUnavailable("the call of the scheduler was given up"))
