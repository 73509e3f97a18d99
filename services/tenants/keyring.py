"""The key book in a router's memory: find a key's caller, and follow changes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from baton.services.tenants.file_book import FileBook
from baton.services.tenants.model import BookError, Caller, digest
from baton.services.tenants.redis_book import RedisBook

LOOK_S = 1.0  # between two checks for changes: the delay until a new or revoked key takes effect

log = logging.getLogger(__name__)


class Keyring:
    """The callers of one router. If the book becomes bad or unreachable, the last good one stays in force."""

    def __init__(self, source: FileBook | RedisBook) -> None:
        self._source = source
        self._callers: dict[bytes, Caller] | None = None
        self._tenants: frozenset[str] = frozenset()
        self._problem = ""

    @property
    def problem(self) -> str:
        """Why no keys are known; "" once the book has been read."""
        return "" if self._callers is not None else self._problem or "the keys were not read yet"

    def find(self, secret: bytes) -> Caller | None:
        """Return the caller with this secret, or None.

        The time that it takes depends on the secret's hash, so it reveals nothing about other secrets.
        """
        return (self._callers or {}).get(digest(secret))

    def tenants(self) -> Iterable[str]:
        """Return the names of all tenants. Thread-safe."""
        return self._tenants

    async def look(self) -> None:
        """Adopt the book if it changed. If it is bad, log that and continue with the last good one."""
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
        """Check for changes forever; run it as a task."""
        while True:
            await asyncio.sleep(LOOK_S)
            await self.look()

    async def close(self) -> None:
        await self._source.close()

    def _complain(self, problem: str) -> None:
        if problem != self._problem:
            log.error("%s; %s", problem, "no key is known" if self._callers is None else "the last keys stay")
        self._problem = problem
