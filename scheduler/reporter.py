"""A router's reports to the scheduler: the events of its attempts, in batches.

Calls of `prefilled` and `finished` only append to a queue; one task sends it, every few milliseconds at most,
and renews all attempts held while they run. While no scheduler answers, the queue is kept, within bounds of
length and age. A scheduler that lost bookings, or never had them, gets a report of all that is held.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from itertools import islice

from baton.attempts import Attempt
from baton.keeping import keep
from baton.protos import scheduler_pb2 as pb
from baton.scheduler.errors import Refused, SchedulerUnavailable
from baton.scheduler.types import Known, attempt_from_wire, attempt_to_wire, known_to_wire
from baton.tasks import stop

FLUSH_S = 0.01  # s between two reports: an event that comes alone goes at once, many go together
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
    """The reports of one router's client. Not shared between event loops."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._events: deque[tuple[float, Event]] = deque()  # with time.monotonic() when they came
        self._held: dict[str, Known] = {}  # by request id; renewed while they are here
        self._renew_every_s = 0.0
        self._renew_at = 0.0  # time.monotonic()
        self._answered = True  # whether the last call was
        self._flushed_at = 0.0  # time.monotonic()
        self._generation = ""  # of the scheduler's state
        self._wake = asyncio.Event()
        self._sent = asyncio.Event()  # set for a moment, when nothing is queued any more
        self._task: asyncio.Task[None] | None = None
        self.dropped = 0  # events that were never reported
        self.on_released: Callable[[], None] = lambda: None  # the scheduler knows that reservations ended

    @property
    def held(self) -> int:
        """The number of attempts being renewed."""
        return len(self._held)

    @property
    def holding(self) -> Iterable[Known]:
        """The attempts being renewed, with what they hold of workers."""
        return self._held.values()

    def hold(self, known: Known, lease_s: float, *, tell: bool = False) -> None:
        """Renew a live attempt from now on, and no longer an earlier one at the same request.

        `tell`: report what it holds, where the scheduler did not place it.
        """
        if not self._held:
            self._renew_at = time.monotonic() + lease_s / RENEWALS_PER_LEASE
        self._held[known.attempt.request_id] = known
        self._renew_every_s = lease_s / RENEWALS_PER_LEASE
        if tell:
            self._add(known_to_wire(known))
        elif self._task is None:
            self._task = keep(self._run, "scheduler-reporter")
        elif self.held == 1:
            self._wake.set()  # it may sleep without a time to renew

    def hold_on(self, attempt: Attempt, epoch: int) -> Attempt:
        """Hold under `epoch` what an attempt holds, and report it. Return the attempt of that epoch.

        A later epoch that was refused, or got no reply, may have ended the attempt for the scheduler.
        """
        held = Attempt(attempt.request_id, epoch)
        known = self._held.get(attempt.request_id)
        if known and known.attempt == attempt and known.booking:
            booking = replace(known.booking, attempt=held)
            lease_s = self._renew_every_s * RENEWALS_PER_LEASE
            self.hold(replace(known, attempt=held, booking=booking), lease_s, tell=True)
        return held

    def prefilled(self, attempt: Attempt) -> None:
        """Report that the prompt is prefilled."""
        known = self._held.get(attempt.request_id)
        if known and known.attempt == attempt:
            self._held[attempt.request_id] = replace(known, prefilled=True)
        self._add(attempt_to_wire(attempt))

    def shared(self, attempt: Attempt, blocks: int) -> None:
        """Report that other requests hold so many KV blocks of the decode worker as well."""
        known = self._held.get(attempt.request_id)
        if known and known.attempt == attempt and known.booking:
            booking = replace(known.booking, blocks=max(0, known.booking.blocks - blocks))
            self._held[attempt.request_id] = replace(known, booking=booking)
            self._add(pb.Shared(attempt=attempt_to_wire(attempt), blocks=booking.blocks))

    def finished(self, attempt: Attempt, outcome: str, cost: pb.Cost | None = None) -> None:
        """Report that the attempt is over: stop, length, abort, error, or retried. Twice does no harm."""
        self._drop(attempt)
        if not self._answered:
            self.on_released()  # for placements that are made without a scheduler
        self._add(pb.Finished(attempt=attempt_to_wire(attempt), outcome=outcome, cost=cost))

    def saw_generation(self, generation: str) -> None:
        """Note the generation of the state that answers; with a new one, report again all that is held."""
        if generation and self._generation and generation != self._generation:
            log.warning("the scheduler's bookings may be lost: reporting %d again", self.held)
            self.tell_again()
        self._generation = generation or self._generation

    def tell_again(self) -> None:
        """Report all that is held, to a scheduler that may not know it."""
        for known in self._held.values():
            self._add(known_to_wire(known))

    async def told(self, within_s: float) -> None:
        """Wait until all that is queued was sent, or for so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                if self._events:
                    await self._sent.wait()

    async def close(self) -> None:
        """Send what is queued, within `CLOSE_S`, and stop renewing."""
        self._held.clear()
        if self._task is None:
            return
        await stop(self._task)
        self._task = None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self._flush()

    def _add(self, event: Event) -> None:
        if len(self._events) >= QUEUED_EVENTS:
            self.dropped += 1
            return
        self._events.append((time.monotonic(), event))
        self._wake.set()
        if self._task is None:
            self._task = keep(self._run, "scheduler-reporter")

    async def _run(self) -> None:
        while True:
            left = max(0.0, self._renew_at - time.monotonic()) if self._held else None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._wake.wait()
            pause_s = FLUSH_S if self._answered else RETRY_S
            await asyncio.sleep(max(0.0, self._flushed_at + pause_s - time.monotonic()))
            self._flushed_at = time.monotonic()
            self._wake.clear()
            await self._flush()
            if self._held and time.monotonic() >= self._renew_at:
                await self._renew()

    async def _flush(self) -> None:
        """Send what is queued now, until a call is not answered."""
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
            for _ in batch:
                self._events.popleft()
            if request.prefilled or request.finished or request.shared:
                self.on_released()
        self._sent.set()
        self._sent.clear()

    def _drop_old(self) -> None:
        oldest = time.monotonic() - KEEP_S
        while self._events and self._events[0][0] < oldest:
            self._events.popleft()
            self.dropped += 1

    async def _renew(self) -> None:
        held = [known.attempt for known in self._held.values()]
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
        self._answered = False
        reply = await self._send(request)
        self._answered = True
        self.saw_generation(reply.generation)
        for message in reply.lost:
            known = self._held.get(message.request_id)
            if known and known.attempt == attempt_from_wire(message):
                log.info(
                    "the booking of %s was lost: reporting it again",
                    message.request_id,
                    extra={"request_id": message.request_id},
                )
                self._add(known_to_wire(known))
        for message in reply.fenced:
            if self._drop(attempt_from_wire(message)):
                log.warning(
                    "%s, epoch %d, is over for the scheduler",
                    message.request_id,
                    message.epoch,
                    extra={"request_id": message.request_id},
                )

    def _drop(self, attempt: Attempt) -> bool:
        """Renew it no longer; return False when it is not held, or another attempt at the request is."""
        known = self._held.get(attempt.request_id)
        if known is None or known.attempt != attempt:
            return False
        del self._held[attempt.request_id]
        return True
