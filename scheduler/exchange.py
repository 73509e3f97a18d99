"""A router's messages to one scheduler: requests for placements, and reports on earlier ones.

Only one message is in flight. The next one carries everything queued in the meantime, because a message costs
both sides more than a placement. Events are kept, up to a limit, while the scheduler does not answer. A
scheduler that lost a booking gets it again, and a restarted one gets all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice

from baton.attempts import Attempt
from baton.keeping import keep
from baton.protos import scheduler_pb2 as pb
from baton.scheduler.errors import Refused, SchedulerUnavailable
from baton.scheduler.types import Booking, attempt_from_wire, attempt_to_wire, booking_to_wire
from baton.tasks import stop

FLUSH_S = 0.01  # pause between reports sent on their own
# How long events other than bookings wait for a message with placements. While requests wait for room,
# they are sent at once to this router's home, because it should see freed room first.
RIDE_S = 0.05
RETRY_S = 0.2  # pause between retries while nobody answers
KEEP_S = 60.0  # s; older events are useless, because their attempts' leases have expired
BATCH = 512  # events and renewals per message
QUEUED_EVENTS = 16_384  # further events are dropped
RENEWALS_PER_LEASE = 3
PLACE_TIMEOUT_S = 3.0  # deadline of a message with placements
REPORT_TIMEOUT_S = 2.0  # deadline of a message without placements
MOST = 64  # placements per message
CLOSE_S = 1.0  # time limit for sending the last reports
_GIVEN_UP = "the call of the scheduler was given up"

Send = Callable[[pb.ExchangeRequest, float], Awaitable[pb.ExchangeReply]]  # request, deadline in s
Event = pb.Booking | pb.Attempt | pb.Shared | pb.Finished  # placed | prefilled | shares KV | finished

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Asked:
    need: pb.Need
    answer: asyncio.Future[pb.PlaceReply]


class Exchange:
    """Send a router's messages to one scheduler. Belongs to one event loop."""

    def __init__(
        self,
        send: Send,
        held: Mapping[str, Booking],
        is_home: Callable[[], bool],
        on_released: Callable[[], None],
        on_unwanted: Callable[[pb.Placement], None],
    ) -> None:
        """Renew the attempts in `held`, keyed by request id, which the caller updates.

        `is_home` tells whether the router would ask this scheduler for a placement now. `on_released` is
        called when the scheduler has learned that reservations ended, and when it has stopped answering.
        `on_unwanted` gets placements that arrive after their callers have left.
        """
        self._send = send
        self._held = held
        self._is_home = is_home
        self._on_released = on_released
        self._on_unwanted = on_unwanted
        self._waiting: deque[_Asked] = deque()
        self._events: deque[tuple[float, Event]] = deque()  # (time.monotonic() of arrival, event)
        self._renewing: deque[Attempt] = deque()  # still to be renewed in this round
        self._sent: tuple[int, int] = (0, 0)  # events and renewals in flight
        self._releases = False  # the events in flight release room
        self._renew_every_s = 0.0
        self._renew_at = 0.0  # time.monotonic()
        self.answered = True  # the last message was answered, and none is in flight
        self._flushed_at = 0.0  # time.monotonic()
        self._hurries = False  # the next report must be sent at once
        self._wanted = False  # requests wait for room
        self._generation = ""  # changes when the scheduler restarts
        self._anew = False  # report everything again: the scheduler restarted, or events were dropped
        self.dropped = 0  # events never reported
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._closed = False  # no new task may start

    def renew(self, lease_s: float, *, first: bool) -> None:
        """Renew the held bookings three times per lease. `first`: nothing was held before."""
        self._renew_every_s = lease_s / RENEWALS_PER_LEASE
        if first:
            self._renew_at = time.monotonic() + self._renew_every_s
            self._rouse()

    def add(self, event: Event) -> None:
        if len(self._events) >= QUEUED_EVENTS:
            self.dropped += 1
            self._anew = True
            return
        self._events.append((time.monotonic(), event))
        self._hurries |= isinstance(event, pb.Booking)
        if self._hurries or len(self._events) == 1:
            self._rouse()

    def saw_generation(self, generation: str) -> None:
        """Report everything again if the generation is new."""
        if generation and self._generation and generation != self._generation:
            self._anew = self._hurries = self.answered = True
            self._rouse()
        self._generation = generation or self._generation

    async def ask(self, need: pb.Need) -> pb.PlaceReply:
        """Request a placement. Raises SchedulerUnavailable, and Refused if the call is not allowed."""
        if self._closed:
            raise SchedulerUnavailable(_GIVEN_UP)
        asked = _Asked(need, asyncio.get_running_loop().create_future())
        self._waiting.append(asked)
        self._rouse()
        try:
            return await asked.answer
        except asyncio.CancelledError:
            # The answer may have arrived together with the cancellation.
            if not (asked.answer.cancelled() or asked.answer.exception()):
                self._unwanted(asked.answer.result())
            raise

    async def close(self) -> None:
        """Fail pending placements, and send the remaining reports within `CLOSE_S`."""
        self._closed = True
        if self._task is None:
            return
        await stop(self._task)
        self._task = None
        _give_up(self._waiting, SchedulerUnavailable(_GIVEN_UP))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                while await self._exchange([]):
                    pass

    def _rouse(self) -> None:
        self._wake.set()
        if self._task is None and not self._closed:
            self._task = keep(self._run, "scheduler-exchange")

    async def _run(self) -> None:
        while True:
            while not self._waiting and (left := self._due_in_s()) != 0.0:
                self._wake.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(left):
                        await self._wake.wait()
            asked: list[_Asked] = []
            while self._waiting and len(asked) < MOST:
                one = self._waiting.popleft()
                if not one.answer.done():  # else its caller has left
                    asked.append(one)
            await self._exchange(asked)

    async def _exchange(self, asked: list[_Asked]) -> bool:
        report = self._next()
        if not asked and not report:
            return False
        answered, self.answered = self.answered, False
        message = pb.ExchangeRequest(needs=[one.need for one in asked], report=report)
        try:
            reply = await self._send(message, PLACE_TIMEOUT_S if asked else REPORT_TIMEOUT_S)
        except SchedulerUnavailable as error:
            self._failed(first=answered)
            _give_up([*asked, *self._waiting], error)
            return False
        except Refused as error:
            self._refused(str(error))
            _give_up(asked, error)
            return True
        else:
            for one, found in zip(asked, reply.replies, strict=True):
                if one.answer.done():
                    self._unwanted(found)
                else:
                    one.answer.set_result(found)
            self._told(reply.report)
            return True
        finally:  # a cancellation or a bug leaves some requests without an answer
            _give_up(asked, SchedulerUnavailable(_GIVEN_UP))

    def _unwanted(self, reply: pb.PlaceReply) -> None:
        if reply.HasField("placement"):
            self._on_unwanted(reply.placement)

    # Reports.

    def _due_in_s(self) -> float | None:
        """Return the seconds until a report must be sent; None if there is nothing to report."""
        due = []
        if self._renewing or self._hurries:
            due.append(0.0)
        elif self._events:
            due.append(self._events[0][0] + (0.0 if self._wanted and self._is_home() else RIDE_S))
        if self._held:
            due.append(self._renew_at)
        if not due:
            return None
        pause_s = FLUSH_S if self.answered else RETRY_S
        return max(0.0, max(min(due), self._flushed_at + pause_s) - time.monotonic())

    def _next(self) -> pb.ReportRequest | None:
        """Return the report to send with the next message, or None."""
        now = time.monotonic()
        if self._anew and self.answered:
            self._begin_anew()
        if self._held and now >= self._renew_at:
            self._renew_at = now + self._renew_every_s
            self._renewing = deque(booking.attempt for booking in self._held.values())
        batch = [event for _, event in islice(self._events, BATCH)]
        # Held attempts may be among the unsent events, so renewals come after all of them.
        room = BATCH - len(batch) if len(batch) == len(self._events) else 0
        renewed = list(islice(self._renewing, room))
        self._sent, self._hurries, self._releases = (len(batch), len(renewed)), False, False
        if not batch and not renewed:
            return None
        self._flushed_at = now
        report = pb.ReportRequest(
            placed=[event for event in batch if isinstance(event, pb.Booking)],
            prefilled=[event for event in batch if isinstance(event, pb.Attempt)],
            finished=[event for event in batch if isinstance(event, pb.Finished)],
            shared=[event for event in batch if isinstance(event, pb.Shared)],
            renewed=[attempt_to_wire(one) for one in renewed if self._holds(one)],
        )
        self._releases = bool(report.prefilled or report.finished or report.shared)
        return report

    def _told(self, reply: pb.ReportReply) -> None:
        """Process an answer. A message without a report is answered, too."""
        if reply.refusal:
            self._refused(reply.refusal)
            return
        self._drop_sent()
        self.answered, self._wanted = True, reply.wanted
        self.saw_generation(reply.generation)
        for message in reply.lost:
            booking = self._held.get(message.request_id)
            if booking and booking.attempt == attempt_from_wire(message):
                log.info(
                    "the booking of %s was lost: reporting it again",
                    message.request_id,
                    extra={"request_id": message.request_id},
                )
                self.add(booking_to_wire(booking))
        for message in reply.fenced:
            log.debug("%s, epoch %d, is over for a scheduler", message.request_id, message.epoch)
        if self._releases:
            self._on_released()

    def _failed(self, *, first: bool) -> None:
        """Keep the events for the next message. `first`: the previous message was answered."""
        if first:
            self._on_released()  # wakes callers: news of free room will not arrive
        oldest = time.monotonic() - KEEP_S
        while self._events and self._events[0][0] < oldest:
            self._events.popleft()
            self.dropped += 1
            self._anew = True

    def _refused(self, why: str) -> None:
        log.warning("a report was refused: %s", why)
        self.dropped += self._sent[0]
        self._drop_sent()
        self.answered = self._anew = True

    def _holds(self, attempt: Attempt) -> bool:
        booking = self._held.get(attempt.request_id)
        return booking is not None and booking.attempt == attempt

    def _drop_sent(self) -> None:
        events, renewals = self._sent
        for _ in range(events):
            self._events.popleft()
        for _ in range(renewals):
            self._renewing.popleft()
        self._sent = 0, 0

    def _begin_anew(self) -> None:
        """Replace the queued events with all current bookings. Only reports of finished attempts stay."""
        self._anew = False
        log.warning("a scheduler may have lost bookings: reporting all %d again", len(self._held))
        self._events = deque(one for one in self._events if isinstance(one[1], pb.Finished))
        now = time.monotonic()
        self._events.extend((now, booking_to_wire(booking)) for booking in self._held.values())


def _give_up(asked: Iterable[_Asked], error: SchedulerUnavailable | Refused) -> None:
    for one in asked:
        if not one.answer.done():
            one.answer.set_exception(type(error)(*error.args))
