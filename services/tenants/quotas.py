"""Enforce all limits of a caller: those of its key and those of its tenant.

A router reports how many requests it runs, not changes of that number: late messages are ignored, and the
requests of a dead router expire. A request takes two Redis calls; each owner with running requests adds a
call every `redis_keys.RENEW_S`.

Rates use throttled-py's GCRA: a bucket of one period's worth, stored as the time at which it will be full
again. There are no windows at whose boundaries twice the rate could pass. Corrections use our own code,
because the library keeps the old number if the new one would be in the past.

Uses undocumented parts of throttled: its store backends, one of them with our Redis client; the GCRA actions
of throttled.rate_limiter.gcra and throttled.asyncio.rate_limiter.gcra, and the number that they store:
seconds of time.monotonic in memory, and in Redis seconds of its TIME since the epoch in `settle.lua`.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence

from redis.asyncio import Redis
from throttled.asyncio.rate_limiter.gcra import RedisLimitAtomicAction
from throttled.asyncio.store import RedisStoreBackend
from throttled.rate_limiter.gcra import MemoryLimitAtomicAction
from throttled.store import BaseStoreBackend, MemoryStoreBackend
from throttled.utils import now_mono_f

from baton.keeping import keep
from baton.services.tenants import redis_keys
from baton.services.tenants.model import Caller, Limits, OverLimit
from baton.services.tenants.shared import SharedStore
from baton.tasks import stop

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
        # Start at the clock's time, so numbers keep growing across a restart; a double holds microseconds
        # exactly.
        self._numbers = itertools.count(time.time_ns() // 1_000)
        self._script = shared.script("slots") if shared is not None else None

    async def renew(self) -> None:
        """Keep reporting all counts, so that none expires; run it as a task if routers share limits."""
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

    __slots__ = ("_slots", "field", "most", "owner")

    def __init__(self, slots: Slots, owner: str, most: int) -> None:
        self._slots = slots
        self.owner = owner
        self.field = "concurrency"
        self.most = most

    def take_here(self, amount: int) -> float | None:
        held = self._slots.held
        if held[self.owner] + amount > math.ceil(self.most / self._slots.parts):
            return RETRY_S
        held[self.owner] += amount
        return None

    async def take_shared(self, _: int) -> float | None:
        return None if await self._slots.say(self.owner, self.most) else RETRY_S

    def give_here(self, amount: int) -> None:
        held = self._slots.held
        held[self.owner] -= amount
        if held[self.owner] <= 0:
            del held[self.owner]

    def give_shared(self, _: int) -> None:
        self._slots.say_soon(self.owner)


PERIODS = {"requests_per_s": 1.0, "tokens_per_min": 60.0}  # s
MAX_BUCKETS = 100_000  # limit in memory (20 MB); the least recently used are dropped


class _OurClient(RedisStoreBackend):
    """The library's backend with our Redis client, whose errors it passes on."""

    base_exceptions = ()

    def __init__(self, client: Redis) -> None:
        BaseStoreBackend.__init__(self)
        self._client = client  # type: ignore[assignment]  # the library expects its own protocol


class Rates:
    """The buckets of one router, in memory and in Redis."""

    def __init__(self, shared: SharedStore | None, parts: int = 1) -> None:
        """parts: how many processes divide the rate; each still allows a whole burst."""
        self.parts = parts
        self.memory = MemoryStoreBackend(options={"MAX_SIZE": MAX_BUCKETS})
        self.take_here = MemoryLimitAtomicAction(self.memory)
        self.shared = shared
        if shared is not None:
            self.prefix = redis_keys.rate_prefix(shared.topic)
            self.take_shared = RedisLimitAtomicAction(_OurClient(shared.client))
            self.settle_shared = shared.script("settle")


class Rate:
    """The limit of one owner's rate: `most` in each period of `field` (quotas.py)."""

    __slots__ = ("_interval", "_name", "_rates", "field", "most", "owner")

    def __init__(self, rates: Rates, field: str, owner: str, most: int) -> None:
        self._rates = rates
        self._name = f"{field}:{owner}"
        self._interval = PERIODS[field] / most * rates.parts
        self.owner = owner
        self.field = field
        self.most = most

    def take_here(self, amount: int) -> float | None:
        limited, _, _, wait_s = self._rates.take_here.do([self._name], [self._interval, self.most, amount])
        return float(wait_s) if limited else None

    async def take_shared(self, amount: int) -> float | None:
        rates = self._rates
        if rates.shared is None:
            return None
        found = await rates.shared.call(
            lambda: rates.take_shared.do([self._key], [self._interval, self.most, amount])
        )
        if found is None:
            return None
        limited, _, _, wait_s = found
        return float(wait_s) if limited else None

    def give_here(self, amount: int) -> None:
        memory = self._rates.memory
        with memory.lock:
            now = now_mono_f()
            full_at = max(now, float(memory.get(self._name) or now)) - amount * self._interval
            if full_at > now:
                memory.set(self._name, full_at, math.ceil(full_at - now))
            else:
                memory.delete(self._name)

    def give_shared(self, amount: int) -> None:
        rates = self._rates
        if rates.shared is not None:
            rates.shared.later(lambda: rates.settle_shared(keys=[self._key], args=[-amount * self._interval]))

    @property
    def _key(self) -> str:
        return f"{self._rates.prefix}:{self._name}"


_NOUNS = {
    "requests_per_s": "requests a second",
    "tokens_per_min": "tokens a minute",
    "concurrency": "requests at a time",
}


# One limit of one owner: first in this router's own count (`take_here`, `give_here`), then in the count that
# all routers share. Taking returns None on success, or else the seconds until it may succeed. Giving back is
# never refused, even a negative amount. The router's own count is never above the shared one, so its refusal
# saves a Redis call. While Redis is down, only the router's own count applies.
Limit = Rate | SlotLimit


class Quotas:
    def __init__(self, shared: SharedStore | None, router_id: str, processes: int = 1) -> None:
        """Share limits through `shared`; without it, divide them among this router's processes."""
        self._shared = shared
        parts = processes if shared is None else 1
        self._rates = Rates(shared, parts)
        self._slots = Slots(shared, router_id, parts)
        self._renewing: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._shared is not None:
            self._shared.start()
            self._renewing = keep(self._slots.renew, "renew the requests under way")

    async def close(self) -> None:
        if self._renewing is not None:
            await stop(self._renewing)
        if self._shared is not None:
            await self._shared.close()

    async def enter(self, caller: Caller) -> Visit:
        """Admit one HTTP request. Raises OverLimit."""
        slots: list[Limit] = [
            SlotLimit(self._slots, owner, of.concurrency) for owner, of in _owners(caller) if of.concurrency
        ]
        await self._take([*slots, *self._rates_of(caller, "requests_per_s")], 1)
        return Visit(self, caller, slots)

    async def charge(self, caller: Caller, tokens: int) -> list[Limit]:
        """Charge a sequence's tokens. Return the limits charged. Raises OverLimit."""
        rates = self._rates_of(caller, "tokens_per_min")
        await self._take(rates, tokens)
        return rates

    def _rates_of(self, caller: Caller, field: str) -> list[Limit]:
        limits = ((owner, getattr(of, field)) for owner, of in _owners(caller))
        return [Rate(self._rates, field, owner, most) for owner, most in limits if most]

    async def _take(self, limits: Sequence[Limit], amount: int) -> None:
        for at, limit in enumerate(limits):
            wait_s = limit.take_here(amount)
            if wait_s is not None:
                for taken in limits[:at]:
                    taken.give_here(amount)
                raise _over(limit, amount, wait_s)
        shared: list[Limit] = []
        try:
            for limit in limits:
                wait_s = await limit.take_shared(amount)
                if wait_s is not None:
                    raise _over(limit, amount, wait_s)
                shared.append(limit)
        except BaseException:  # including cancellation, if the client disconnects
            for taken in limits:
                taken.give_here(amount)
            for taken in shared:
                taken.give_shared(amount)
            raise


class Visit:
    """One HTTP request within its caller's limits: its slots, and the tokens of its sequences."""

    def __init__(self, quotas: Quotas, caller: Caller, slots: list[Limit]) -> None:
        self.caller = caller
        self._quotas = quotas
        self._slots = slots
        self._charges: dict[
            str, tuple[list[Limit], int]
        ] = {}  # keyed by sequence: the limits charged, tokens

    async def charge(self, sequence: str, prompt: int, most: int) -> None:
        """Charge the tokens of a prompt and of the longest possible answer. Raises OverLimit.

        If that exceeds a minute's limit, the whole limit is charged: the answer may turn out short.
        """
        allowed = [of.tokens_per_min for _, of in _owners(self.caller) if of.tokens_per_min]
        if not allowed:
            return
        tokens = max(prompt, min(prompt + most, *allowed))
        self._charges[sequence] = await self._quotas.charge(self.caller, tokens), tokens

    def settle(self, sequence: str, used: int) -> None:
        limits, tokens = self._charges.pop(sequence, ([], 0))
        _give(limits, tokens - used)

    def leave(self) -> None:
        _give(self._slots, 1)


def _give(limits: Sequence[Limit], amount: int) -> None:
    for limit in limits if amount else ():
        limit.give_here(amount)
        limit.give_shared(amount)


def _owners(caller: Caller) -> Iterator[tuple[str, Limits]]:
    yield f"key:{caller.key}", caller.key_limits
    yield f"tenant:{caller.tenant}", caller.settings


def _over(limit: Limit, amount: int, wait_s: float) -> OverLimit:
    kind, _, name = limit.owner.partition(":")
    rule = f"{kind} {name!r} is limited to {limit.most} {_NOUNS[limit.field]} ({limit.field})"
    if limit.field == "tokens_per_min":
        rule += f", and this request needs {amount}"
        if amount > limit.most:
            return OverLimit(f"{rule}: it can never be admitted", limit.field, 0.0)
    return OverLimit(f"{rule}; try again in {wait_s:.3g} s", limit.field, wait_s)
