"""The interface of a store: what the schedulers of a topic share, and what outlives them.

Workers and bookings are not in it: each scheduler hears of them itself, and keeps them in memory. Called only
by schedulers' own processes. Every method is one atomic step, on the store's own clock.

    by operators    drain, drained
    by autoscaling  tell, lead, told, order
    by schedulers   tell, told (processes, turns), take_turn
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from baton.scheduler.types import Told

TOLD_KINDS = ("router", "fleet", "process", "turns")


class Store(ABC):
    """Keep what schedulers share. No method but `open` raises.

    While the store is unreachable (`problem`), nobody leads, nobody gets a turn and `told` is empty; a drain
    holds at the scheduler that was asked, and is written to the store when it is back.
    """

    name: str  # memory, or the URL without its password
    problem: str = ""  # why it does not answer; empty while it does

    def __init__(self) -> None:
        # Name -> how often an operator drained it or undid that, so odd while drained. The higher count is
        # the later one.
        self._drains: dict[str, int] = {}

    @property
    def drained(self) -> frozenset[str]:
        """The drained names, whether workers of these names are registered or not."""
        return frozenset(name for name, count in self._drains.items() if count % 2)

    async def open(self) -> None:  # noqa: B027 (memory needs none)
        """Connect; call it once, before all others. Raises StoreRefuses if waiting cannot help."""

    async def tend(self) -> None:  # noqa: B027
        """Read others' drains, and check whether the store answers. Called about twice a second."""

    async def drain(self, name: str, *, undo: bool = False) -> bool:
        """Place nothing more on workers of this name, present and future, or `undo` that.

        Return False if that was already so.
        """
        if not self.problem:
            await self.tend()
        if (name in self.drained) is not undo:
            return False
        self._drains[name] = self._drains.get(name, 0) + 1
        if not self.problem:
            await self.tend()
        return True

    @abstractmethod
    async def take_turn(self, what: str, for_s: float) -> bool:
        """Return True to one caller of all schedulers, False to all others for `for_s`. Called rarely."""

    @abstractmethod
    async def tell(self, kind: str, who: str, message: bytes, lease_s: float) -> bytes:
        """Keep the last message of one of `TOLD_KINDS` for `lease_s`; return a fleet's orders.

        Called about once a second for each sender.
        """

    @abstractmethod
    async def lead(self, who: str, for_s: float) -> int:
        """Make `who` the deciding scheduler for `for_s`, or extend its lease; return its fencing number.

        Return 0 while another one decides. Each new one gets a higher number than all before, even if the
        store has lost its data, because it comes from the store's clock. Called every few seconds.
        """

    @abstractmethod
    async def told(self) -> Told:
        """Return the messages whose leases have not expired, and the orders. Called every two seconds."""

    @abstractmethod
    async def order(self, fence: int, orders: Mapping[str, bytes]) -> bool:
        """Replace all orders. Return False, and change nothing, if `fence` is no longer current."""

    async def close(self) -> None:  # noqa: B027
        """Close connections. Does not raise."""
