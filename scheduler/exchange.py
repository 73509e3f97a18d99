"""Exchange messages between a router and one scheduler: placements, and reports of what became of them.

One message is under way at a time. The next one carries everything queued meanwhile: the requested placements
and the events to report (reporter.py). A message costs both sides more than a placement does. At low rates
each placement goes at once, in its own message; the higher the rate, the more share one.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from baton.keeping import keep
from baton.protos import scheduler_pb2 as pb
from baton.scheduler.errors import Refused, SchedulerUnavailable
from baton.scheduler.reporter import Reporter
from baton.tasks import stop

PLACE_TIMEOUT_S = 3.0  # deadline of a message with placements
REPORT_TIMEOUT_S = 2.0  # deadline without placements; finished attempts keep their room until reported
MOST = 64  # placements per message
CLOSE_S = 1.0  # s to send the last reports
_GIVEN_UP = "the call of the scheduler was given up"

Send = Callable[[pb.ExchangeRequest, float], Awaitable[pb.ExchangeReply]]  # request, deadline in s


@dataclass(frozen=True, slots=True)
class _Asked:
    need: pb.Need
    answer: asyncio.Future[pb.PlaceReply]


class Exchange:
    """Send a router's messages to one scheduler. Belongs to one event loop."""

    def __init__(self, send: Send, reporter: Reporter, on_unwanted: Callable[[pb.Placement], None]) -> None:
        """Use `send` to send the placements requested here and the events of `reporter`.

        `on_unwanted` gets placements whose callers have left by the time they arrive.
        """
        self._send = send
        self._reporter = reporter
        self._on_unwanted = on_unwanted
        self._waiting: deque[_Asked] = deque()
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._closed = False  # stops new tasks from starting beside the last message
        reporter.on_news = self._rouse

    async def ask(self, need: pb.Need) -> pb.PlaceReply:
        """Return the reply. Raises SchedulerUnavailable, and Refused if this call is not allowed."""
        if self._closed:
            raise SchedulerUnavailable(_GIVEN_UP)
        asked = _Asked(need, asyncio.get_running_loop().create_future())
        self._waiting.append(asked)
        self._rouse()
        try:
            return await asked.answer
        except asyncio.CancelledError:
            # the answer and the cancellation coincided
            if not (asked.answer.cancelled() or asked.answer.exception()):
                self._unwanted(asked.answer.result())
            raise

    async def close(self) -> None:
        """Give up pending placements and send the remaining reports, within `CLOSE_S`."""
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
            while not self._waiting and (left := self._reporter.due_in_s()) != 0.0:
                self._wake.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(left):
                        await self._wake.wait()
            asked: list[_Asked] = []
            while self._waiting and len(asked) < MOST:
                one = self._waiting.popleft()
                if not one.answer.done():  # the caller still waits
                    asked.append(one)
            await self._exchange(asked)

    async def _exchange(self, asked: list[_Asked]) -> bool:
        """Send a message, if there is anything to say, and deliver the answer; return whether one arrived."""
        report = self._reporter.next()
        if not asked and not report:
            return False
        answered, self._reporter.answered = self._reporter.answered, False
        message = pb.ExchangeRequest(needs=[one.need for one in asked], report=report)
        try:
            reply = await self._send(message, PLACE_TIMEOUT_S if asked else REPORT_TIMEOUT_S)
        except SchedulerUnavailable as error:
            self._reporter.failed(first=answered)
            _give_up([*asked, *self._waiting], error)  # their message would fail, too
            return False
        except Refused as error:
            self._reporter.refused(str(error))
            _give_up(asked, error)
            return True
        else:
            for one, found in zip(asked, reply.replies, strict=True):
                if one.answer.done():
                    self._unwanted(found)
                else:
                    one.answer.set_result(found)
            self._reporter.told(reply.report)
            return True
        finally:  # only after a cancellation or a bug are any left
            _give_up(asked, SchedulerUnavailable(_GIVEN_UP))

    def _unwanted(self, reply: pb.PlaceReply) -> None:
        if reply.HasField("placement"):
            self._on_unwanted(reply.placement)


def _give_up(asked: Iterable[_Asked], error: SchedulerUnavailable | Refused) -> None:
    for one in asked:
        if not one.answer.done():
            one.answer.set_exception(type(error)(*error.args))
