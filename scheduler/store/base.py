"""The interface of a store: what schedulers of a topic share, and what outlives them.

Workers and bookings are no part of it: each scheduler hears of them itself, and has them in memory. Called by
schedulers' own processes alone. Every method is one atomic step, on the store's own clock.

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
    """Keep what schedulers share. No method raises, but `open`.

    While the store is away (`problem`) nobody leads, nobody has a turn and nothing is told; a drain holds at
    the scheduler that was asked, and is told to the store when it is back.
    """

    name: str  # memory, or the URL without its password
    problem: str = ""  # why it does not answer; empty while it does

    def __init__(self) -> None:
        # Name -> how often an operator drained it or undid that: odd while it is drained. The higher count
        # is the later one.
        self._drains: dict[str, int] = {}

    @property
    def drained(self) -> frozenset[str]:
        """The names on which an operator wants nothing placed, whether workers of them are there or not."""
        return frozenset(name for name, count in self._drains.items() if count % 2)

    async def open(self) -> None:  # noqa: B027 (memory needs none)
        """Connect; to be called once, before all others. Raises StoreRefuses where waiting cannot help."""

    async def tend(self) -> None:  # noqa: B027
        """Learn what others drained, and see whether the store answers. Called about twice a second."""

    async def drain(self, name: str, *, undo: bool = False) -> bool:
        """Place nothing more on workers of this name, present and future, or `undo` that.

        Return False if it was so already.
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

        Called about once a second for each of them.
        """

    @abstractmethod
    async def lead(self, who: str, for_s: float) -> int:
        """Make `who` the one decider for `for_s`, or longer if it is already; return its fence.

        Return 0 while another one is. Each new decider has a higher fence than all before, also where the
        store has lost what it held: it is of the store's clock. Called every few seconds.
        """

    @abstractmethod
    async def told(self) -> Told:
        """Return what was told within its lease, and the orders. Called every two seconds or so."""

    @abstractmethod
    async def order(self, fence: int, orders: Mapping[str, bytes]) -> bool:
        """Replace all orders. Return False, and change nothing, where `fence` is no longer the decider's."""

    async def close(self) -> None:  # noqa: B027
        """Give back connections. Does not raise."""
