"""Limit concurrent requests. A router reports how many it runs, not changes of that number.

Late messages are ignored, and the requests of a dead router expire. A request takes two Redis calls, and each
owner with running requests one more every `redis_keys.RENEW_S`.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections import Counter

from baton.services.tenants import redis_keys
from baton.services.tenants.shared import SharedStore

RETRY_S = 1.0  # a guess: when a slot will be free is not known
_LEASE_MS = round(redis_keys.SLOT_LEASE_S * 1_000)
_WHATEVER = -1


class Slots:
    """The running requests of this router, by owner."""

    def __init__(self, shared: SharedStore | None, router_id: str, parts: int = 1) -> None:
        """parts: how many processes divide an owner's slots; shares are rounded up."""
        self.parts = parts
        self.held: Counter[str] = Counter()
        self._shared = shared
        self._router_id = router_id
        # Begin at the clock's time, so that numbers also grow over a restart; a double holds microseconds
        # exactly.
        self._numbers = itertools.count(time.time_ns() // 1_000)
        self._script = shared.script("slots") if shared is not None else None

    async def renew(self) -> None:
        """Report all counts again, forever; run it as a task if routers share limits."""
        while True:
            await asyncio.sleep(redis_keys.RENEW_S)
            for owner in list(self.held):
                await self.say(owner, _WHATEVER)

    async def say(self, owner: str, most: int) -> bool:
        """Report this router's count. Return False if all routers together exceed the limit."""
        shared, script = self._shared, self._script
        if shared is None or script is None:
            return True
        key = redis_keys.slots(shared.topic, owner)
        args: list[str | int] = [self._router_id, self.held[owner], next(self._numbers), most, _LEASE_MS]
        return await shared.call(lambda: script(keys=[key], args=[*args])) != 0

    def say_soon(self, owner: str) -> None:
        if self._shared is not None:
            self._shared.later(lambda: self.say(owner, _WHATEVER))


class SlotLimit:
    """The limit of one owner's concurrent requests (quotas.py). Calls to Redis report the whole count."""

    __slots__ = ("_owner", "_slots", "field", "most")

    def __init__(self, slots: Slots, owner: str, most: int) -> None:
        self._slots = slots
        self._owner = owner
        self.field = "concurrency"
        self.most = most

    def take_here(self, amount: int) -> float | None:
        held = self._slots.held
        if held[self._owner] + amount > math.ceil(self.most / self._slots.parts):
            return RETRY_S
        held[self._owner] += amount
        return None

    async def take_shared(self, amount: int) -> float | None:
        del amount
        return None if await self._slots.say(self._owner, self.most) else RETRY_S

    def give_here(self, amount: int) -> None:
        held = self._slots.held
        held[self._owner] -= amount
        if held[self._owner] <= 0:
            del held[self._owner]

    def give_shared(self, amount: int) -> None:
        del amount
        self._slots.say_soon(self._owner)
