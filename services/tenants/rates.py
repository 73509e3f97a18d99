"""Limit requests per second and tokens per minute with throttled-py's GCRA.

The generic cell rate algorithm stores one number per bucket, the time at which it will be full again. The
bucket refills steadily, so there is no window boundary at which twice the rate passes. Its capacity is one
period's worth.

Uses undocumented parts of throttled: its store backends, one of them with our Redis client; the GCRA actions
of throttled.rate_limiter.gcra and throttled.asyncio.rate_limiter.gcra, and the number that they store:
seconds of time.monotonic in memory, and in Redis seconds of its TIME since the epoch in `settle.lua`.
Corrections use our own code, because the library keeps the old number if the new one would be in the past.
"""

from __future__ import annotations

import math

from redis.asyncio import Redis
from throttled.asyncio.rate_limiter.gcra import RedisLimitAtomicAction
from throttled.asyncio.store import RedisStoreBackend
from throttled.rate_limiter.gcra import MemoryLimitAtomicAction
from throttled.store import BaseStoreBackend, MemoryStoreBackend
from throttled.utils import now_mono_f

from baton.services.tenants import redis_keys
from baton.services.tenants.shared import SharedStore

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

    __slots__ = ("_interval", "_name", "_rates", "field", "most")

    def __init__(self, rates: Rates, field: str, owner: str, most: int) -> None:
        self._rates = rates
        self._name = f"{field}:{owner}"
        self._interval = PERIODS[field] / most * rates.parts
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
