"""The interface of one owner's limit, as `Quotas` uses it."""

from __future__ import annotations

from typing import Protocol


class Limit(Protocol):
    """Counts first in this router, then in the count that all routers share.

    The own count is never above the shared one, so a refusal by it needs no Redis call: a client that floods
    one router costs Redis next to nothing. While Redis is away only the own count applies.
    """

    field: str  # the limit's name in the book
    most: int

    def take_here(self, amount: int) -> float | None:
        """Take from this router's count. Return None, or the seconds until it may succeed."""

    async def take_shared(self, amount: int) -> float | None:
        """Take from the shared count, after `take_here`. Return the same; None while Redis is away."""

    def give_here(self, amount: int) -> None:
        """Give back to this router's count; a negative amount is taken without a check."""

    def give_shared(self, amount: int) -> None:
        """Do the same with the shared count, in the background."""
