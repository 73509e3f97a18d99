"""The way of a router's reports to one scheduler: events in batches, and renewals of all that is held.

An event only joins a queue; one task sends it, every few milliseconds at most, and renews the held attempts.
While the scheduler does not answer, the queue is kept, within bounds of length and age. One that lost
bookings is told these again, and one that has begun anew all that is held.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from itertools import islice

from baton.attempts import Attempt
from baton.keeping import keep
from baton.protos import scheduler_pb2 as pb
from baton.scheduler.errors import Refused, SchedulerUnavailable
from baton.scheduler.types import Known, attempt_from_wire, attempt_to_wire, known_to_wire
from baton.tasks import stop

FLUSH_S = 0.01  # s between two reports: an event that comes alone goes at once, many go together
# The same of ends, to a scheduler that this router asks for no placements. Bookings go at once. So where all
# is full, room that comes free is seen by one scheduler first, and not given away by two.
ELSEWHERE_FLUSH_S = 0.05
RETRY_S = 0.2  # s between tries while nobody answers
KEEP_S = 60.0  # s; older events are of no use any more: their attempts' leases have run out
BATCH_EVENTS = 512
QUEUED_EVENTS = 16_384  # more are dropped
RENEWALS_PER_LEASE = 3
CLOSE_S = 1.0  # s; for the last batches

Event = pb.Booking | pb.Attempt | pb.Shared | pb.Finished  # placed; prefilled; shares KV; over
Send = Callable[[pb.ReportRequest], Awaitable[pb.ReportReply]]

log = logging.getLogger(__name__)


class Reporter:
    """The reports to one scheduler. Not shared between event loops."""

    def __init__(
        self,
        send: Send,
        held: Mapping[str, Known],
        is_home: Callable[[], bool],
        on_released: Callable[[], None],
    ) -> None:
        """Report by `send`, and renew what is in `held`, by request id: others fill and empty it.

        `is_home` tells whether the router would ask this scheduler for a placement now. `on_released` is
        called when it knows that reservations ended, and when it has stopped answering.
        """
        self._send = send
        self._held = held
        self._is_home = is_home
        self._on_released = on_released
        self._events: deque[tuple[float, Event]] = deque()  # with time.monotonic() when they came
        self._renew_every_s = 0.0
        self._renew_at = 0.0  # time.monotonic()
        self.answered = True  # whether the last call was
        self._flushed_at = 0.0  # time.monotonic()
        self._generation = ""  # of the scheduler: one life of it
        self._anew = False  # it has begun another, or events were dropped: it is to be told all
        self._wake = asyncio.Event()
        self._hurry = asyncio.Event()  # a booking is to be told
        self._task: asyncio.Task[None] | None = None
        self.dropped = 0  # events that were never reported

    def renew(self, lease_s: float, *, first: bool) -> None:
        """Renew what is held thrice a lease from now on. `first`: nothing was held before."""
        self._renew_every_s = lease_s / RENEWALS_PER_LEASE
        if first:
            self._renew_at = time.monotonic() + self._renew_every_s
            self._wake.set()  # it may sleep without a time to renew
        self._start()

    def add(self, event: Event) -> None:
        """Report this with the next batch."""
        if len(self._events) >= QUEUED_EVENTS:
            self.dropped += 1
            self._anew = True  # what is held is told again, however much of it was dropped
            return
        self._events.append((time.monotonic(), event))
        self._wake.set()
        if isinstance(event, pb.Booking):
            self._hurry.set()
        self._start()

    def saw_generation(self, generation: str) -> None:
        """Note the generation that answers; with a new one, report again all that is held."""
        if generation and self._generation and generation != self._generation:
            self._anew = True
            self._wake.set()
            self._start()
        self._generation = generation or self._generation

    async def close(self) -> None:
        """Send what is queued, within `CLOSE_S`, and stop renewing."""
        if self._task is None:
            return
        await stop(self._task)
        self._task = None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self._flush()

    def _start(self) -> None:
        if self._task is None:
            self._task = keep(self._run, "scheduler-reporter")

    async def _run(self) -> None:
        while True:
            left = max(0.0, self._renew_at - time.monotonic()) if self._held else None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._wake.wait()
            pause_s = FLUSH_S if self.answered else RETRY_S
            await asyncio.sleep(max(0.0, self._flushed_at + pause_s - time.monotonic()))
            if not self._is_home():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(ELSEWHERE_FLUSH_S):
                        await self._hurry.wait()
            self._flushed_at = time.monotonic()
            self._wake.clear()
            self._hurry.clear()
            # Before the events are sent: what is held later, the scheduler may not have been told yet.
            due = list(self._held.values()) if self._held and self._flushed_at >= self._renew_at else []
            await self._flush()
            if due:
                await self._renew([one.attempt for one in due if one.attempt.request_id in self._held])

    async def _flush(self) -> None:
        """Send what is queued now, until a call is not answered."""
        if self._anew and self.answered:
            self._begin_anew()
        due = len(self._events)
        while due > 0:
            # Events leave the queue only when they arrived: those of a cancelled call are sent at close.
            batch = [event for _, event in islice(self._events, min(due, BATCH_EVENTS))]
            due -= len(batch)
            request = pb.ReportRequest(
                placed=[event for event in batch if isinstance(event, pb.Booking)],
                prefilled=[event for event in batch if isinstance(event, pb.Attempt)],
                finished=[event for event in batch if isinstance(event, pb.Finished)],
                shared=[event for event in batch if isinstance(event, pb.Shared)],
            )
            try:
                await self._tell(request)
            except SchedulerUnavailable:
                self._drop_old()
                if self._events:
                    self._wake.set()
                return
            except Refused as error:
                log.warning("a report was refused: %s", error)
                self.dropped += len(batch)
                self.answered = self._anew = True
            for _ in batch:
                self._events.popleft()
            if request.prefilled or request.finished or request.shared:
                self._on_released()

    def _begin_anew(self) -> None:
        """Queue all that is held in place of the events about it; the ends of others stay."""
        self._anew = False
        log.warning("a scheduler has lost count: reporting %d bookings again", len(self._held))
        self._events = deque(one for one in self._events if isinstance(one[1], pb.Finished))
        now = time.monotonic()
        self._events.extend((now, known_to_wire(known)) for known in self._held.values())

    def _drop_old(self) -> None:
        oldest = time.monotonic() - KEEP_S
        while self._events and self._events[0][0] < oldest:
            self._events.popleft()
            self.dropped += 1
            self._anew = True

    async def _renew(self, held: list[Attempt]) -> None:
        self._renew_at = time.monotonic() + self._renew_every_s
        for begin in range(0, len(held), BATCH_EVENTS):
            batch = [attempt_to_wire(attempt) for attempt in held[begin : begin + BATCH_EVENTS]]
            try:
                await self._tell(pb.ReportRequest(renewed=batch))
            except SchedulerUnavailable:
                self._renew_at = time.monotonic() + RETRY_S
                return
            except Refused as error:
                log.warning("a renewal was refused: %s", error)

    async def _tell(self, request: pb.ReportRequest) -> None:
        """Send one report. Raises SchedulerUnavailable and Refused."""
        was_answered, self.answered = self.answered, False
        try:
            reply = await self._send(request)
        except SchedulerUnavailable:
            if was_answered:
                self._on_released()  # who waits for an answer about room waits no longer
            raise
        self.answered = True
        self.saw_generation(reply.generation)
        for message in reply.lost:
            known = self._held.get(message.request_id)
            if known and known.attempt == attempt_from_wire(message):
                log.info(
                    "the booking of %s was lost: reporting it again",
                    message.request_id,
                    extra={"request_id": message.request_id},
                )
                self.add(known_to_wire(known))
        for message in reply.fenced:  # of an epoch whose reply was lost: it goes on under a later one
            log.debug("%s, epoch %d, is over for a scheduler", message.request_id, message.epoch)
