"""The queue of requests for room on the workers: bounded in number and time, fair between clients.

A request is placed at once while none waits. When all workers are full it joins its client's queue, and the
clients take turns, one request each: a client that sends a thousand delays its own requests, not another's
first. (A request is one sequence here: of several prompts, or `n` above 1, each waits for itself.) The one
whose turn it is tries a placement whenever reservations of this router end, and now and then besides, as
other routers' end too. None overtakes it, so a long prompt gets its room in the end.

The cost is one placement call each time that room may have become free, for one request; the others sleep.
For one event loop; not thread-safe.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable

from baton.services.router.errors import NotAdmitted, Why
from baton.services.router.metrics import RouterMetrics

RETRY_S = (0.05, 1.0)  # s; the first and the longest pause between two tries without a sign of room
_PACE_OF = 256  # last departures: requests that began together end together, so fewer would mislead
_PACE_KNOWN_S = 10.0  # the least age of a queue before a request is refused for its expected wait

Turn = asyncio.Future[None]


class WaitingRoom:
    """The queue of one router. Invariant: while requests wait, it is exactly one's turn."""

    def __init__(
        self,
        limit: int,
        wait_s: float,
        metrics: RouterMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Let at most `limit` requests wait, each at most `wait_s` seconds; with a limit of 0 none waits."""
        self.limit = limit
        self.wait_s = wait_s
        self._metrics = metrics
        self._clock = clock
        self._clients: OrderedDict[str, OrderedDict[Turn, None]] = OrderedDict()  # next in turn first
        self._waiting = 0
        self._turn: Turn | None = None
        self._room = asyncio.Event()
        self._because = ""  # the last try found no room
        self._began = 0.0  # the queue, on the clock
        self._departures: deque[float] = deque(maxlen=_PACE_OF)  # since then, on the clock
        metrics.watch_waiting(self)

    def __len__(self) -> int:
        return self._waiting

    @property
    def estimate_s(self) -> float:
        """The expected wait of a new client's request, seconds; 0 while unknown."""
        return self._estimate("")

    def check_room(self) -> None:
        """Check, before a request costs anything, that the queue is not full. Raises NotAdmitted (503)."""
        if self._waiting and self._waiting >= self.limit:
            raise self._refusal(f"{self._waiting} wait already (router.max_waiting)", self.estimate_s)

    def freed(self) -> None:
        """Note that reservations ended: there may be room now."""
        self._room.set()

    async def admit(self, client: str, deadline: float, place: Callable[[], Awaitable[None]]) -> float:
        """Await `place`, at once or in turn; return the seconds waited.

        `place` raises NotAdmitted. With FULL, or while others wait, the request joins the queue (with a limit
        of 0 it does not); there `place` is tried until it succeeds, or refuses for good. `deadline`
        (time.monotonic) is the request's own, and is enforced by the caller. Raises NotAdmitted when the
        queue is full, when the wait would be too long, when it was, and what `place` raises otherwise.
        """
        arrived = self._clock()
        if not self._waiting:
            try:
                await place()
            except NotAdmitted as no:
                if no.why is not Why.FULL or not self.limit:
                    raise
                self._because = no.message
            else:
                return 0.0
        self.check_room()
        self._check_wait(client, min(self.wait_s, deadline - arrived))
        turn = self._join(client)
        try:
            async with asyncio.timeout(self.wait_s):
                await turn
                pause_s, longest_s = RETRY_S
                while True:
                    self._room.clear()
                    try:
                        await place()
                    except NotAdmitted as no:
                        if no.never:
                            raise
                        self._because = no.message
                    else:
                        self._departures.append(self._clock())
                        break
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(pause_s):
                            await self._room.wait()
                    pause_s = min(2 * pause_s, longest_s)
        except TimeoutError:
            limit = f"no room within {self.wait_s:g} s (router.max_wait_s)"
            raise self._refusal(f"{limit}, {self._waiting} wait: {self._because}", self.estimate_s) from None
        finally:
            self._leave(client, turn)
        waited_s = self._clock() - arrived
        self._metrics.waited(waited_s)
        return waited_s

    def _join(self, client: str) -> Turn:
        if not self._waiting:
            self._departures.clear()
            self._began = self._clock()
        turn: Turn = asyncio.get_running_loop().create_future()
        self._clients.setdefault(client, OrderedDict())[turn] = None
        self._waiting += 1
        if self._turn is None:
            self._next()
        return turn

    def _leave(self, client: str, turn: Turn) -> None:
        turns = self._clients[client]
        del turns[turn]
        if not turns:
            del self._clients[client]
        self._waiting -= 1
        if self._turn is turn:
            if turns:
                self._clients.move_to_end(client)
            self._next()

    def _next(self) -> None:
        """Give the turn to the first request of the client that has waited longest for one."""
        self._turn = None
        if self._clients:
            turns = next(iter(self._clients.values()))
            self._turn = next(iter(turns))
            if not self._turn.done():  # a cancelled one leaves by itself
                self._turn.set_result(None)

    def _estimate(self, client: str) -> float:
        """Return the expected wait of the client's next request, at the pace of the last departures.

        Seconds; 0 while the pace is unknown.
        """
        own = len(self._clients.get(client, ()))
        others = (turns for name, turns in self._clients.items() if name != client)
        before = own + sum(min(len(turns), own + 1) for turns in others)
        if not self._departures:
            return 0.0
        full = self._departures.maxlen == len(self._departures)
        since = self._departures[0] if full else self._began
        return before * (self._clock() - since) / len(self._departures)

    def _check_wait(self, client: str, allowed_s: float) -> None:
        """Refuse a request at once whose wait would be too long. Raises NotAdmitted."""
        wait_s = self._estimate(client)
        if wait_s > allowed_s and self._clock() - self._began >= _PACE_KNOWN_S:
            raise self._refusal(
                f"{self._waiting} wait already, another would wait about {wait_s:.0f} s and may wait "
                f"{allowed_s:.3g} s (router.max_wait_s, or its own deadline)",
                wait_s - allowed_s,
            )

    def _refusal(self, message: str, retry_after_s: float) -> NotAdmitted:
        return NotAdmitted(message, Why.QUEUE, max(1.0, retry_after_s))
