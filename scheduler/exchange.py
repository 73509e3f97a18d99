"""A router's messages to one scheduler: requests for placements, and reports on earlier ones.

Only one is in flight. The next one carries all that was queued in the meantime, because a message costs both
sides more than a placement.
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
REPORT_TIMEOUT_S = 2.0  # deadline of a message without placements
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
        """Send placements requested here, and `reporter`'s events, with `send`.

        `on_unwanted` gets placements that arrive after their callers have left.
        """
        self._send = send
        self._reporter = reporter
        self._on_unwanted = on_unwanted
        self._waiting: deque[_Asked] = deque()
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._closed = False  # no new task may start
        reporter.on_news = self._rouse

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
            while not self._waiting and (left := self._reporter.due_in_s()) != 0.0:
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
        report = self._reporter.next()
        if not asked and not report:
            return False
        answered, self._reporter.answered = self._reporter.answered, False
        message = pb.ExchangeRequest(needs=[one.need for one in asked], report=report)
        try:
            reply = await self._send(message, PLACE_TIMEOUT_S if asked else REPORT_TIMEOUT_S)
        except SchedulerUnavailable as error:
            self._reporter.failed(first=answered)
            _give_up([*asked, *self._waiting], error)
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
        finally:  # a cancellation or a bug leaves some without an answer
            _give_up(asked, SchedulerUnavailable(_GIVEN_UP))

    def _unwanted(self, reply: pb.PlaceReply) -> None:
        if reply.HasField("placement"):
            self._on_unwanted(reply.placement)


def _give_up(asked: Iterable[_Asked], error: SchedulerUnavailable | Refused) -> None:
    for one in asked:
        if not one.answer.done():
            one.answer.set_exception(type(error)(*error.args))
