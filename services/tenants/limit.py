"""One limit of one owner, as `Quotas` uses it."""

from __future__ import annotations

from typing import Protocol


class Limit(Protocol):
    """Counts what an owner takes, in this router and in the count that all routers share.

    This router's count is never above the shared one, so Redis is not asked about what it refuses: a client
    that floods one router costs Redis next to nothing. While Redis is away this router's count alone decides.
    """

    field: str  # its name in the book
    most: int

    def take_here(self, amount: int) -> float | None:
        """Take from this router's count. Return None, or the seconds after which it may succeed."""

    async def take_shared(self, amount: int) -> float | None:
        """Take from the shared count, after `take_here`. Return the same; None while Redis is away."""

    def give_here(self, amount: int) -> None:
        """Give back to this router's count; a negative amount takes unconditionally."""

    def give_shared(self, amount: int) -> None:
        """Do the same to the shared count, soon and without waiting."""
