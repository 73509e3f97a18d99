"""Queue requests that wait for room on the workers: limited in number and time, fair between clients.

Tenants take turns by weight, and so do a tenant's clients, one sequence each. One request has the turn, and
tries a placement whenever a booking of this router ends, and periodically, as other routers' bookings end
too. No request of its class overtakes it, so a long prompt gets room eventually. Requests that lost their
worker go before all others, because their clients see a stalled stream.

Each class has a queue. A lower priority number goes first; other classes may fill only a part of the workers
and of this queue (`ServiceClass.room`). A class is owed a slot if it has less than its share of the running
requests, or if none of its waiting requests was placed for `patience_s`: its next request is placed as one of
the first class. Choosing the next request takes time proportional to the number of waiting tenants. Not
thread-safe.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable

from baton.services.classes import STANDARD, Classes, ServiceClass
from baton.services.router.errors import NotAdmitted, Why
from baton.services.router.metrics import RouterMetrics
from baton.services.router.state import NOBODY, Party

RETRY_S = (0.05, 1.0)  # the first and the longest pause between two attempts while no booking ends
_PACE_OF = 256  # departures that define the pace; with fewer, requests that end together would distort it
_PACE_KNOWN_S = 10.0  # minimum age of a queue before a request is refused for its expected wait
# An owed turn takes precedence for OWED_S seconds, then has none for REST_S: its request may be too large.
OWED_S, REST_S = 1.0, 10.0
LEAST_PATIENCE_S = 1.0  # lower bound of `patience_s` here

Place = Callable[[ServiceClass], Awaitable[None]]  # places a request as one of this class


Turn = asyncio.Event  # set while it is the request's turn; a request with precedence may take the turn away


class _Tenant:
    def __init__(self) -> None:
        self.weight = 1
        self.position = 0.0
        self.waiting = 0
        self.clients: OrderedDict[str, OrderedDict[Turn, None]] = OrderedDict()

    @property
    def first(self) -> Turn:
        return next(iter(next(iter(self.clients.values()))))

    def before(self, client: str) -> int:
        """Return how many of the tenant's requests go before the client's next one."""
        own = len(self.clients.get(client, ()))
        return own + sum(min(len(turns), own + 1) for name, turns in self.clients.items() if name != client)


class ClassQueue:
    """The waiting requests of one class: round-robin among tenants, and among each tenant's clients.

    Tenants take turns by stride scheduling (Waldspurger and Weihl, 1995): the tenant with the lowest position
    is next, and a turn advances it by 1/weight. A tenant that was not waiting joins at the current position.
    """

    def __init__(self, service: ServiceClass) -> None:
        self.service = service
        self.waiting = 0
        self.placed = 0  # admitted requests of the class that have not ended
        self.since = 0.0  # when the queue became non-empty, or a request was last placed from it
        self.owed_until = 0.0  # until then this class goes before other classes
        self.rests_until = 0.0  # until then it may not go before them again
        self._tenants: dict[str, _Tenant] = {}
        self._position = 0.0  # position of the tenant that had the last turn

    @property
    def first(self) -> Turn:
        return min((one for one in self._tenants.values() if one.waiting), key=lambda one: one.position).first

    def join(self, party: Party, turn: Turn) -> None:
        tenant = self._tenants.setdefault(party.tenant, _Tenant())
        if not tenant.waiting:  # turns are not saved up
            tenant.position = max(tenant.position, self._position)
        tenant.weight = party.weight
        tenant.clients.setdefault(party.client, OrderedDict())[turn] = None
        self.waiting += 1
        tenant.waiting += 1

    def leave(self, party: Party, turn: Turn) -> None:
        """Remove a request. If it had the turn, its tenant and client move back in the order."""
        tenant = self._tenants[party.tenant]
        turns = tenant.clients[party.client]
        del turns[turn]
        if not turns:
            del tenant.clients[party.client]
        if turn.is_set():  # it has had its turn
            if turns:
                tenant.clients.move_to_end(party.client)
            self._position = tenant.position
            tenant.position += 1 / tenant.weight
        self.waiting -= 1
        tenant.waiting -= 1

    def before(self, party: Party) -> float:
        """Return how many requests go before the client's next one."""
        mine = self._tenants.get(party.tenant)
        own = mine.before(party.client) if mine is not None else 0
        others = (tenant for name, tenant in self._tenants.items() if name != party.tenant)
        return own + sum(min(one.waiting, (own + 1) * one.weight / party.weight) for one in others)

    def clear(self) -> None:
        self._tenants.clear()


class WaitingRoom:
    """The queue of one model in a router. Invariant: while requests wait, exactly one has the turn."""

    def __init__(
        self,
        limit: int,
        wait_s: float,
        metrics: RouterMetrics,
        classes: Classes | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Let up to `limit` requests (none if 0) wait for up to `wait_s` seconds each.

        The limit does not apply to requests that lost their worker: they were admitted before.
        """
        self.limit = limit
        self.wait_s = wait_s
        self._metrics = metrics
        self._clock = clock
        classes = classes or Classes()
        metrics.classes.expect(classes)
        self._queues = {one.name: ClassQueue(one) for one in classes}  # sorted by priority
        self._first_class = next(iter(self._queues.values())).service
        self._resuming = ClassQueue(self._first_class)  # requests that lost their worker, in order
        self._waiting = 0
        self._turn: Turn | None = None
        self._turn_of: ClassQueue | None = None  # the queue of `_turn`
        self._room = asyncio.Event()
        self._because = ""  # why the last try found no room
        self._began = 0.0  # when requests began to wait
        self._departures: deque[float] = deque(maxlen=_PACE_OF)  # when placed requests left the queue
        metrics.watch_waiting(self, lambda: self.estimate_s)

    def __len__(self) -> int:
        return self._waiting

    @property
    def estimate_s(self) -> float:
        """The expected wait of a new tenant's request of the standard class, in seconds; 0 if unknown."""
        return self._estimate(NOBODY, STANDARD)

    def check_room(self, service: ServiceClass = STANDARD) -> None:
        """Check that the queue is not full. Raises NotAdmitted (503)."""
        most = max(1, int(service.room * self.limit)) if self.limit else 0
        if self._waiting and self._waiting >= most:
            kept = f"; {self.limit - most} places are reserved for classes before {service.name}"
            raise self._refusal(
                f"{self._waiting} wait already (router.max_waiting){kept if most < self.limit else ''}",
                self._estimate(NOBODY, service),
            )

    def freed(self) -> None:
        """Wake the request that has the turn: bookings ended, so there may be room."""
        self._room.set()

    async def admit(
        self, party: Party, deadline: float, place: Place, service: ServiceClass = STANDARD
    ) -> float:
        """Await `place` until it succeeds, at once or in turn; return the seconds waited.

        If `place` raises NotAdmitted with FULL, or if others are waiting, the request queues and `place` is
        retried. Other errors of `place` are passed on. Raises NotAdmitted if the queue is full, or if the
        wait is or would be too long. The caller enforces the request's `deadline` (time.monotonic).
        """
        arrived = self._clock()
        queue = self._queue(service)
        if not self._before(queue):
            try:
                await place(service)
            except NotAdmitted as no:
                if no.why is not Why.FULL or not self.limit:
                    raise
                self._because = no.message
            else:
                queue.placed += 1
                return 0.0
        self.check_room(service)
        self._check_wait(party, service, min(self.wait_s, deadline - arrived))
        turn = self._join(party, queue)
        try:
            async with asyncio.timeout(self.wait_s):
                await self._place_in_turn(turn, queue, place, lambda no: no.never)
            queue.placed += 1
            queue.since, queue.owed_until = self._clock(), 0.0
            self._departures.append(self._clock())
        except TimeoutError:
            limit = f"no room within {self.wait_s:g} s (half of router.request_timeout_s)"
            raise self._refusal(f"{limit}, {self._waiting} wait: {self._because}", self.estimate_s) from None
        finally:
            self._leave(party, turn, queue)
        waited_s = self._clock() - arrived
        self._metrics.wait_seconds.observe(waited_s)
        return waited_s

    def left(self, service: ServiceClass) -> None:
        self._queue(service).placed -= 1

    async def resume(self, wait_s: float, place: Place) -> None:
        """Await `place` for a request that lost its worker, ahead of all queued requests.

        For `wait_s` seconds `place` is retried while it raises NotAdmitted with FULL; then the last error is
        raised.
        """
        turn = self._join(NOBODY, self._resuming)
        refusal = NotAdmitted(f"no room within {wait_s:.3g} s: others resume first", Why.FULL)

        def is_final(no: NotAdmitted) -> bool:
            nonlocal refusal
            refusal = no
            return no.why is not Why.FULL

        try:
            async with asyncio.timeout(wait_s):
                await self._place_in_turn(turn, self._resuming, place, is_final)
        except TimeoutError:
            raise refusal from None
        finally:
            self._leave(NOBODY, turn, self._resuming)

    async def _place_in_turn(
        self, turn: Turn, queue: ClassQueue, place: Place, is_final: Callable[[NotAdmitted], bool]
    ) -> None:
        """Try `place` while the request has the turn, until it succeeds or its refusal is final.

        A request that is owed the turn is placed as one of the first class.
        """
        pause_s, longest_s = RETRY_S
        while True:
            await turn.wait()
            self._room.clear()
            try:
                await place(self._first_class if self._is_owed(queue) else queue.service)
            except NotAdmitted as no:
                if is_final(no):
                    raise
                self._because = no.message
                self._choose()  # OWED_S may have passed
            else:
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._room.wait()
            pause_s = min(2 * pause_s, longest_s)

    def _begin(self) -> None:
        for queue in (self._resuming, *self._queues.values()):
            queue.clear()
        self._departures.clear()
        self._began = self._clock()

    def _queue(self, service: ServiceClass) -> ClassQueue:
        return self._queues.get(service.name) or next(iter(self._queues.values()))

    def _before(self, queue: ClassQueue) -> int:
        own = queue.service.priority
        ahead = sum(one.waiting for one in self._queues.values() if one.service.priority <= own)
        return self._resuming.waiting + ahead

    def _is_owed(self, queue: ClassQueue) -> bool:
        if queue is self._resuming:
            return True
        now = self._clock()
        placed = sum(one.placed for one in self._queues.values())
        within = queue.placed + 1 <= queue.service.share * (placed + 1)
        waited = now - queue.since >= max(LEAST_PATIENCE_S, queue.service.patience_s)
        if queue.owed_until and now > queue.owed_until:
            # The rest begins at the end of OWED_S, which may be long ago if the queue was empty.
            queue.owed_until, queue.rests_until = 0.0, queue.owed_until + REST_S
        if not (within or waited) or now < queue.rests_until:
            return False
        queue.owed_until = queue.owed_until or now + OWED_S
        return True

    def _join(self, party: Party, queue: ClassQueue) -> Turn:
        if not self._waiting:
            self._begin()
        turn = Turn()
        self._waiting += 1
        if not queue.waiting:
            queue.since = self._clock()
        queue.join(party, turn)
        self._tell(party, queue, 1)
        self._choose()
        return turn

    def _leave(self, party: Party, turn: Turn, queue: ClassQueue) -> None:
        self._waiting -= 1
        queue.leave(party, turn)
        self._tell(party, queue, -1)
        if turn is self._turn:
            self._turn = None
            self._choose()

    def _tell(self, party: Party, queue: ClassQueue, change: int) -> None:
        if queue is not self._resuming:
            self._metrics.tenants.waiting(party.tenant, change)
            self._metrics.classes.waiting(queue.service, change)

    def _choose(self) -> None:
        """Give the turn to a resuming request, else to a class that is owed it, else to the highest class."""
        turn: Turn | None = None
        if waiting := [one for one in (self._resuming, *self._queues.values()) if one.waiting]:
            queue = next((one for one in waiting if self._is_owed(one)), waiting[0])
            turn = self._turn if self._turn is not None and queue is self._turn_of else queue.first
            self._turn_of = queue
        if turn is self._turn:
            return
        if self._turn is not None:
            self._turn.clear()
        self._turn = turn
        if turn is not None:
            turn.set()

    def _estimate(self, party: Party, service: ServiceClass) -> float:
        if not self._departures:
            return 0.0
        queue = self._queue(service)
        before = self._before(queue) - queue.waiting + queue.before(party)
        full = self._departures.maxlen == len(self._departures)
        since = self._departures[0] if full else self._began
        return before * (self._clock() - since) / len(self._departures)

    def _check_wait(self, party: Party, service: ServiceClass, allowed_s: float) -> None:
        wait_s = self._estimate(party, service)
        if wait_s > allowed_s and self._clock() - self._began >= _PACE_KNOWN_S:
            raise self._refusal(
                f"{self._waiting} wait already, this one would wait about {wait_s:.0f} s and may wait "
                f"{allowed_s:.3g} s (half of router.request_timeout_s, or its own deadline)",
                wait_s - allowed_s,
            )

    def _refusal(self, message: str, retry_after_s: float) -> NotAdmitted:
        return NotAdmitted(message, Why.QUEUE, max(1.0, retry_after_s))
