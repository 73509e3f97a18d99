"""Let clients take turns for a few slots, and bound what is held in memory. For one event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Hashable

from baton.services.router.errors import Overloaded


class Turns:
    """`slots` for all clients, at most `each` for one; up to `waiting` requests wait, by client in turn."""

    def __init__(self, slots: int, each: int, waiting: int) -> None:
        self._free = slots
        self._each = each
        self._room = waiting
        self._taken: Counter[Hashable] = Counter()
        self._queues: OrderedDict[Hashable, dict[asyncio.Future[None], None]] = OrderedDict()

    @contextlib.asynccontextmanager
    async def turn(self, client: Hashable) -> AsyncIterator[None]:
        """Wait for a slot and hold it. Raises Overloaded if too many wait."""
        await self._take(client)
        try:
            yield
        finally:
            self._give(client)

    async def _take(self, client: Hashable) -> None:
        if self._room <= 0:
            raise Overloaded("too many requests with images wait to be prepared", 1.0)
        turn = asyncio.get_running_loop().create_future()
        self._queues.setdefault(client, {})[turn] = None
        self._room -= 1
        self._grant()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # granted in the same moment
                self._give(client)
            else:
                self._leave(client, turn)
            raise

    def _give(self, client: Hashable) -> None:
        self._free += 1
        self._taken[client] -= 1
        if not self._taken[client]:
            del self._taken[client]
        self._grant()

    def _grant(self) -> None:
        while self._free:
            client = next((one for one in self._queues if self._taken[one] < self._each), None)
            if client is None:
                return
            self._queues.move_to_end(client)
            turn = next(iter(self._queues[client]))
            self._leave(client, turn)
            if turn.cancelled():
                continue
            self._free -= 1
            self._taken[client] += 1
            turn.set_result(None)

    def _leave(self, client: Hashable, turn: asyncio.Future[None]) -> None:
        queue = self._queues.get(client, {})
        if turn in queue:
            del queue[turn]
            self._room += 1
            if not queue:
                del self._queues[client]


class Store:
    """Room for `most` units, taken in order of arrival."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.free = most
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, units: int) -> None:
        """Wait until there is room for `units`, at most `most` of them."""
        if not self._waiting and units <= self.free:
            self.free -= units
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((units, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give(units)
            else:
                with contextlib.suppress(ValueError):
                    self._waiting.remove((units, turn))
                self.give(0)
            raise

    def give(self, units: int) -> None:
        self.free += units
        while self._waiting and self._waiting[0][0] <= self.free:
            taken, turn = self._waiting.popleft()
            if not turn.cancelled():
                self.free -= taken
                turn.set_result(None)
