"""What happened to a router's attempts, told to the scheduler in batches.

Calls of `prefilled` and `finished` only write into a queue; one task sends it every few milliseconds, and
renews all attempts held while they run. What cannot be sent is tried again a few times and then dropped: an
attempt that is over is no longer renewed, so its reservation runs out with its lease at the latest.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable

from baton.protos import scheduler_pb2 as pb
from baton.scheduler.errors import Refused, SchedulerUnavailable
from baton.scheduler.tasks import spawn, stop
from baton.scheduler.types import Attempt, attempt_from_wire, attempt_to_wire

FLUSH_S = 0.005  # s; events wait this long for company
RETRY_S = 0.2  # s between tries of one batch
BATCH_TRIES = 5
BATCH_EVENTS = 512
QUEUED_EVENTS = 16_384  # more are dropped
RENEWALS_PER_LEASE = 3
CLOSE_S = 1.0  # s; for the last batches

Event = pb.Attempt | pb.Finished  # an attempt alone: its prompt was read
Send = Callable[[pb.ReportRequest], Awaitable[pb.ReportReply]]

log = logging.getLogger(__name__)


class Reporter:
    """Belongs to one router's client. Not shared between event loops."""

    def __init__(self, send: Send, on_lost: Callable[[Attempt], None] | None = None) -> None:
        self._send = send
        self._on_lost = on_lost
        self._events: deque[Event] = deque()
        self._held: dict[str, Attempt] = {}  # by request id; renewed while they are here
        self._renew_every_s = 0.0
        self._renew_at = 0.0  # time.monotonic()
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.dropped = 0  # events that were never told

    @property
    def held(self) -> int:
        """Attempts being renewed."""
        return len(self._held)

    def hold(self, attempt: Attempt, lease_s: float) -> None:
        """Renew `attempt` from now on; an earlier one at the same request no longer."""
        if not self._held:
            self._renew_at = time.monotonic() + lease_s / RENEWALS_PER_LEASE
        self._held[attempt.request_id] = attempt
        self._renew_every_s = lease_s / RENEWALS_PER_LEASE
        if self._task is None:
            self._task = spawn(self._run(), "scheduler-reporter")
        elif self.held == 1:
            self._wake.set()  # it may sleep without a time to renew

    def prefilled(self, attempt: Attempt) -> None:
        """The prompt was read."""
        self._add(attempt_to_wire(attempt))

    def finished(self, attempt: Attempt, outcome: str, cost: pb.Cost | None = None) -> None:
        """The attempt is over: stop, length, abort, error, or retried. Telling it twice does no harm."""
        if self._held.get(attempt.request_id) == attempt:
            del self._held[attempt.request_id]
        self._add(pb.Finished(attempt=attempt_to_wire(attempt), outcome=outcome, cost=cost))

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
        self._events.append(event)
        self._wake.set()
        if self._task is None:
            self._task = spawn(self._run(), "scheduler-reporter")

    async def _run(self) -> None:
        while True:
            left = max(0.0, self._renew_at - time.monotonic()) if self._held else None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._wake.wait()
            await asyncio.sleep(FLUSH_S)
            self._wake.clear()
            await self._flush()
            if self._held and time.monotonic() >= self._renew_at:
                self._renew_at = time.monotonic() + self._renew_every_s
                await self._renew()

    async def _flush(self) -> None:
        """Send what is queued. Stops at a batch that had to be dropped, so that renewals get their turn."""
        told = True
        while self._events and told:
            # Events leave the queue only when they were told: what a cancelled call carried is sent at close.
            batch = [self._events[index] for index in range(min(BATCH_EVENTS, len(self._events)))]
            request = pb.ReportRequest(
                prefilled=[event for event in batch if isinstance(event, pb.Attempt)],
                finished=[event for event in batch if isinstance(event, pb.Finished)],
            )
            told = await self._tell(request) is not None
            self.dropped += 0 if told else len(batch)
            for _ in batch:
                self._events.popleft()
        if self._events:
            self._wake.set()

    async def _renew(self) -> None:
        held = list(self._held.values())
        for begin in range(0, len(held), BATCH_EVENTS):
            batch = [attempt_to_wire(attempt) for attempt in held[begin : begin + BATCH_EVENTS]]
            reply = await self._tell(pb.ReportRequest(renewed=batch))
            for message in reply.lost if reply else ():
                self._lose(attempt_from_wire(message))

    def _lose(self, attempt: Attempt) -> None:
        if self._held.get(attempt.request_id) != attempt:
            return  # it ended, or a later one took its place, while we asked
        del self._held[attempt.request_id]
        log.warning("reservation of %s, epoch %d, ran out", attempt.request_id, attempt.epoch)
        if self._on_lost:
            self._on_lost(attempt)

    async def _tell(self, request: pb.ReportRequest) -> pb.ReportReply | None:
        """None when the batch was refused, or could not be sent after `BATCH_TRIES` tries."""
        for tries_left in reversed(range(BATCH_TRIES)):
            try:
                return await self._send(request)
            except Refused as error:
                log.warning("a report was refused: %s", error)
                return None
            except SchedulerUnavailable as error:
                if not tries_left:
                    log.warning("a report was dropped: %s", error)
                    return None
                await asyncio.sleep(RETRY_S)
        return None
