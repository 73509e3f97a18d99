"""One limit of one owner, as `Quotas` uses it."""

from __future__ import annotations

from typing import Protocol


class Limit(Protocol):
    """Takes and gives back, first by this router's own count, then by that which all routers share.

    The own count is never above the shared one, so what it refuses need not be asked of Redis: a client that
    floods one router costs Redis next to nothing. While Redis is away the own count alone is the limit.
    """

    field: str  # its name in the book
    most: int

    def take_here(self, amount: int) -> float | None:
        """Take by this router's count. Return None, or the seconds after which it may succeed."""

    async def take_shared(self, amount: int) -> float | None:
        """Take by the shared count, after `take_here`. The same result; None too while Redis is away."""

    def give_here(self, amount: int) -> None:
        """Give back, or with a negative amount take what must be taken, by this router's count."""

    def give_shared(self, amount: int) -> None:
        """Do the same by the shared count, soon and without waiting for it."""
