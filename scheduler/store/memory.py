"""The store of a single scheduler, in its memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from baton.scheduler.store.base import TOLD_KINDS, Store
from baton.scheduler.types import Told


class MemoryStore(Store):
    """A store in memory. Methods are atomic because they do not await."""

    name = "memory"

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        # (kind, who) -> end of the lease, message
        self._told: dict[tuple[str, str], tuple[float, bytes]] = {}
        self._leader = ("", 0, 0.0)  # who, fencing number, end of the lease
        self._orders: dict[str, bytes] = {}  # keyed by fleet

    async def tell(self, kind: str, who: str, message: bytes, lease_s: float) -> bytes:
        self._told[kind, who] = self._clock() + lease_s, message
        return self._orders.get(who, b"") if kind == "fleet" else b""

    async def lead(self, who: str, for_s: float) -> int:
        now = self._clock()
        leader, fence, until = self._leader
        if until > now and leader != who:
            return 0
        if until <= now:
            fence = max(fence + 1, int(1_000 * time.time()))
        self._leader = who, fence, now + for_s
        return fence

    async def told(self) -> Told:
        now = self._clock()
        self._told = {key: one for key, one in self._told.items() if one[0] > now}
        by_kind: dict[str, dict[str, bytes]] = {kind: {} for kind in TOLD_KINDS}
        for (kind, who), (_, message) in self._told.items():
            by_kind[kind][who] = message
        return Told(by_kind["router"], by_kind["fleet"], self._orders, by_kind["process"], by_kind["turns"])

    async def order(self, fence: int, orders: Mapping[str, bytes]) -> bool:
        if fence != self._leader[1] or self._leader[2] <= self._clock():
            return False
        self._orders = dict(orders)
        return True
