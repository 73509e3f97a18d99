"""The interface of a store: the state that the schedulers of a topic share, and that outlives them.

Workers and bookings are not in it, because every scheduler learns them from workers and routers. Every method
is one atomic step, on the store's own clock.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

from baton.scheduler.types import Told

TOLD_KINDS = ("router", "fleet", "process", "turns")


class Store(ABC):
    """The schedulers' shared state. No method except `open` raises.

    While the store is unreachable (`problem`), `lead` returns 0, `order` False, and `told` nothing. A
    drain takes effect at the scheduler that was asked, and is written to the store later.
    """

    name: str  # memory, or the URL without its password
    problem: str = ""  # why the store does not answer; empty while it does

    def __init__(self) -> None:
        # Name -> how often an operator drained or undrained it: odd while drained. The highest count is the
        # latest.
        self._drains: dict[str, int] = {}

    @property
    def drained(self) -> frozenset[str]:
        """The names of drained workers, whether or not a worker of that name is registered."""
        return frozenset(name for name, count in self._drains.items() if count % 2)

    async def open(self) -> None:  # noqa: B027 (memory needs none)
        """Connect; call it first. Raises StoreRefuses if waiting cannot help."""

    async def tend(self) -> None:  # noqa: B027
        """Exchange drains, and check whether the store answers. Called about twice a second."""

    async def drain(self, name: str, *, undo: bool = False) -> bool:
        """Drain or undrain workers of this name, present and future. Return False if nothing changed."""
        if not self.problem:
            await self.tend()
        if (name in self.drained) is not undo:
            return False
        self._drains[name] = self._drains.get(name, 0) + 1
        if not self.problem:
            await self.tend()
        return True

    @abstractmethod
    async def tell(self, kind: str, who: str, message: bytes, lease_s: float) -> bytes:
        """Keep a sender's last message for `lease_s`; return its orders if the sender is a fleet."""

    @abstractmethod
    async def lead(self, who: str, for_s: float) -> int:
        """Make `who` the deciding scheduler for `for_s`, or extend its lease; return its fencing number.

        Return 0 while another one decides. Each new decider gets a higher number than all earlier ones, even
        after the store has lost its data, because a new number is at least the store's clock.
        """

    @abstractmethod
    async def told(self) -> Told:
        """Return the messages whose leases have not expired, and the orders."""

    @abstractmethod
    async def order(self, fence: int, orders: Mapping[str, bytes]) -> bool:
        """Replace all orders. Return False, and change nothing, if `fence` is not current."""

    async def close(self) -> None:  # noqa: B027
        """Close connections. Does not raise."""


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
