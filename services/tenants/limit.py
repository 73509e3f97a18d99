"""One limit of one owner, as `Quotas` uses it."""

from __future__ import annotations

from typing import Protocol


class Limit(Protocol):
    """Takes and gives back, first in this router's own count, then in the count that all routers share.

    The own count is never above the shared one, so its refusals need no call of Redis: a client that floods
    one router costs Redis next to nothing. While Redis is away the own count alone is the limit.
    """

    field: str  # the limit's name in the book
    most: int

    def take_here(self, amount: int) -> float | None:
        """Take in this router's count. Return None, or the seconds after which it may succeed."""

    async def take_shared(self, amount: int) -> float | None:
        """Take in the shared count, after `take_here`; return the same, and None while Redis is away."""

    def give_here(self, amount: int) -> None:
        """Give back in this router's count, or take, whatever the limit, if the amount is negative."""

    def give_shared(self, amount: int) -> None:
        """Do the same in the shared count, soon and without waiting for it."""
