"""The queue of requests for room on the workers: bounded in number and time, fair between clients.

A request is placed at once while none waits. When all workers are full it joins its client's queue. Tenants
take turns, each as often as its weight says, and so do the clients of a tenant, one request each: a client
that sends a thousand delays its own requests, not another's first. (A request is one sequence here: of
several prompts, or `n` above 1, each waits for itself.) The one whose turn it is tries a placement whenever
reservations of this router end, and now and then besides, as other routers' end too. None overtakes it, so a
long prompt gets its room in the end, but for requests that lost their worker: their clients see a stream that
stands still, so they go before those that have not begun.

The turns of tenants are stride scheduling (Waldspurger and Weihl, 1995): the next is the one that has gone
the least way, and each turn takes it 1/weight further; one that was not waiting begins where the others are.

The cost is one placement call each time that room may have become free, for one request; the others sleep.
To choose the next costs a look at each tenant that waits. For one event loop; not thread-safe.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable

from baton.services.router.errors import NotAdmitted, Why
from baton.services.router.metrics import RouterMetrics
from baton.services.router.state import Party

RETRY_S = (0.05, 1.0)  # s; the first and the longest pause between two tries without a sign of room
_PACE_OF = 256  # last departures: requests that began together end together, so fewer would mislead
_PACE_KNOWN_S = 10.0  # the least age of a queue before a request is refused for its expected wait

Place = Callable[[], Awaitable[None]]


class _Turn(asyncio.Event):
    """One request's turn: set while it has it. It may be taken away by one that goes before."""


class _Tenant:
    """The requests of one tenant that wait, by client; the next in turn first."""

    def __init__(self) -> None:
        self.weight = 1
        self.way = 0.0
        self.waiting = 0
        self.clients: OrderedDict[str, OrderedDict[_Turn, None]] = OrderedDict()

    @property
    def first(self) -> _Turn:
        """The turn of the request that is next."""
        return next(iter(next(iter(self.clients.values()))))

    def before(self, client: str) -> int:
        """Return how many of its requests go before the client's next one."""
        own = len(self.clients.get(client, ()))
        return own + sum(min(len(turns), own + 1) for name, turns in self.clients.items() if name != client)


class WaitingRoom:
    """The queue of one router. Invariant: while requests wait, it is exactly one's turn."""

    def __init__(
        self,
        limit: int,
        wait_s: float,
        metrics: RouterMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Let at most `limit` requests wait, each at most `wait_s` seconds; with a limit of 0 none waits.

        Requests that lost their worker wait whatever the limit: they were admitted before.
        """
        self.limit = limit
        self.wait_s = wait_s
        self._metrics = metrics
        self._clock = clock
        self._resuming: OrderedDict[_Turn, None] = OrderedDict()
        self._tenants: dict[str, _Tenant] = {}
        self._way = 0.0  # of the tenant that had the last turn
        self._waiting = 0
        self._turn: _Turn | None = None
        self._room = asyncio.Event()
        self._because = ""  # the last try found no room
        self._began = 0.0  # the queue, on the clock
        self._departures: deque[float] = deque(maxlen=_PACE_OF)  # since then, on the clock
        metrics.watch_waiting(self)

    def __len__(self) -> int:
        return self._waiting

    @property
    def estimate_s(self) -> float:
        """The expected wait of a new tenant's request, seconds; 0 while unknown."""
        return self._estimate(Party())

    def check_room(self) -> None:
        """Check, before a request costs anything, that the queue is not full. Raises NotAdmitted (503)."""
        if self._waiting and self._waiting >= self.limit:
            raise self._refusal(f"{self._waiting} wait already (router.max_waiting)", self.estimate_s)

    def freed(self) -> None:
        """Note that reservations ended: there may be room now."""
        self._room.set()

    async def admit(self, party: Party, deadline: float, place: Place) -> float:
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
        self._check_wait(party, min(self.wait_s, deadline - arrived))
        turn = self._join(party)
        try:
            async with asyncio.timeout(self.wait_s):
                await self._place_in_turn(turn, place, lambda no: no.never)
            self._departures.append(self._clock())
        except TimeoutError:
            limit = f"no room within {self.wait_s:g} s (router.max_wait_s)"
            raise self._refusal(f"{limit}, {self._waiting} wait: {self._because}", self.estimate_s) from None
        finally:
            self._leave(party, turn)
        waited_s = self._clock() - arrived
        self._metrics.waited(waited_s)
        return waited_s

    async def resume(self, wait_s: float, place: Place) -> None:
        """Await `place` for a request that was placed before, in front of all that were not.

        While `place` raises NotAdmitted with FULL it is tried again, for `wait_s` seconds. Raises what it
        raises otherwise, and the last one when the time is over.
        """
        turn = _Turn()
        if not self._waiting:
            self._begin()
        self._resuming[turn] = None
        self._waiting += 1
        self._choose()
        refusal = NotAdmitted(f"others resume before it, and no room within {wait_s:.3g} s", Why.FULL)

        def is_final(no: NotAdmitted) -> bool:
            nonlocal refusal
            refusal = no
            return no.why is not Why.FULL

        try:
            async with asyncio.timeout(wait_s):
                await self._place_in_turn(turn, place, is_final)
        except TimeoutError:
            raise refusal from None
        finally:
            del self._resuming[turn]
            self._waiting -= 1
            self._choose()

    async def _place_in_turn(
        self, turn: _Turn, place: Place, is_final: Callable[[NotAdmitted], bool]
    ) -> None:
        """Try `place` while it is this one's turn, until it succeeds or its refusal is final."""
        pause_s, longest_s = RETRY_S
        while True:
            await turn.wait()
            self._room.clear()
            try:
                await place()
            except NotAdmitted as no:
                if is_final(no):
                    raise
                self._because = no.message
            else:
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._room.wait()
            pause_s = min(2 * pause_s, longest_s)

    def _begin(self) -> None:
        """Begin a queue."""
        self._tenants.clear()
        self._departures.clear()
        self._began = self._clock()

    def _join(self, party: Party) -> _Turn:
        if not self._waiting:
            self._begin()
        turn = _Turn()
        tenant = self._tenants.setdefault(party.tenant, _Tenant())
        if not tenant.waiting:  # what it did not use is not saved up
            tenant.way = max(tenant.way, self._way)
        tenant.weight = party.weight
        tenant.clients.setdefault(party.client, OrderedDict())[turn] = None
        self._waiting += 1
        tenant.waiting += 1
        self._metrics.tenants.waiting(party.tenant, tenant.waiting)
        if self._turn is None:
            self._choose()
        return turn

    def _leave(self, party: Party, turn: _Turn) -> None:
        tenant = self._tenants[party.tenant]
        turns = tenant.clients[party.client]
        del turns[turn]
        if not turns:
            del tenant.clients[party.client]
        if turn.is_set():  # it has had its turn
            if turns:
                tenant.clients.move_to_end(party.client)
            self._way = tenant.way
            tenant.way += 1 / tenant.weight
        self._waiting -= 1
        tenant.waiting -= 1
        self._metrics.tenants.waiting(party.tenant, tenant.waiting)
        if turn.is_set():
            self._choose()

    def _choose(self) -> None:
        """Give the turn to the first that resumes, or else to the first of the tenant that is behind."""
        turn: _Turn | None = None
        if self._resuming:
            turn = next(iter(self._resuming))
        elif waiting := [one for one in self._tenants.values() if one.waiting]:
            turn = min(waiting, key=lambda one: one.way).first
        if turn is self._turn:
            return
        if self._turn is not None:
            self._turn.clear()
        self._turn = turn
        if turn is not None:
            turn.set()

    def _estimate(self, party: Party) -> float:
        """Return the expected wait of the client's next request, at the pace of the last departures.

        Seconds; 0 while the pace is unknown.
        """
        if not self._departures:
            return 0.0
        mine = self._tenants.get(party.tenant)
        own = mine.before(party.client) if mine is not None else 0
        others = (tenant for name, tenant in self._tenants.items() if name != party.tenant)
        before = (
            len(self._resuming)
            + own
            + sum(min(one.waiting, (own + 1) * one.weight / party.weight) for one in others)
        )
        full = self._departures.maxlen == len(self._departures)
        since = self._departures[0] if full else self._began
        return before * (self._clock() - since) / len(self._departures)

    def _check_wait(self, party: Party, allowed_s: float) -> None:
        """Refuse a request at once whose wait would be too long. Raises NotAdmitted."""
        wait_s = self._estimate(party)
        if wait_s > allowed_s and self._clock() - self._began >= _PACE_KNOWN_S:
            raise self._refusal(
                f"{self._waiting} wait already, another would wait about {wait_s:.0f} s and may wait "
                f"{allowed_s:.3g} s (router.max_wait_s, or its own deadline)",
                wait_s - allowed_s,
            )

    def _refusal(self, message: str, retry_after_s: float) -> NotAdmitted:
        return NotAdmitted(message, Why.QUEUE, max(1.0, retry_after_s))
