"""The keys in a router's memory: finds a key's caller, and follows changes of the book."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Protocol

from baton.services.tenants.errors import BookError
from baton.services.tenants.model import Book, Caller, digest

LOOK_S = 1.0  # between two looks for changes: the longest until a new or removed key takes effect

log = logging.getLogger(__name__)


class Source(Protocol):
    """The place where the book is."""

    async def changed(self) -> Book | None:
        """Return the book if it changed since the last call. Raises BookError."""

    async def close(self) -> None:
        """Release its resources."""


class Keyring:
    """The callers of one router. The last good book counts until the source is good again."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._callers: dict[bytes, Caller] | None = None
        self._tenants: frozenset[str] = frozenset()
        self._problem = ""

    @property
    def problem(self) -> str:
        """The reason why no key is known, in one line; "" once the book was read."""
        return "" if self._callers is not None else self._problem or "the keys were not read yet"

    def find(self, secret: bytes) -> Caller | None:
        """Return the caller with this secret, or None.

        The duration depends on the secret's hash, so it reveals nothing about other secrets.
        """
        return (self._callers or {}).get(digest(secret))

    def tenants(self) -> Iterable[str]:
        """Return the names of all tenants. Any thread may call this."""
        return self._tenants

    async def look(self) -> None:
        """Adopt a change of the book, if there is one. Log a bad one and change nothing."""
        try:
            book = await self._source.changed()
        except BookError as error:
            self._complain(str(error))
            return
        self._problem = ""
        if book is not None:
            self._callers = book.callers()
            self._tenants = frozenset({*book.tenants, *(key.tenant for key in book.keys.values())})
            log.info("%d keys of %d tenants", len(book.keys), len(self._tenants))

    async def follow(self) -> None:
        """Look for changes forever; run it as a task."""
        while True:
            await asyncio.sleep(LOOK_S)
            await self.look()

    async def close(self) -> None:
        """Release the source."""
        await self._source.close()

    def _complain(self, problem: str) -> None:
        """Log a problem, once."""
        if problem != self._problem:
            log.error("%s; %s", problem, "no key is known" if self._callers is None else "the last keys stay")
        self._problem = problem
