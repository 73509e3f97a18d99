"""The key book in Redis, for several routers without a shared file.

A router that reads the book also writes a probe key: a former master that is cut off from the new one still
answers reads, so revoked keys would stay valid.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Awaitable, Callable
from typing import Any, cast

from redis.asyncio import Redis
from redis.exceptions import RedisError, WatchError

from baton import redis_link
from baton.redis_errors import refusal
from baton.redis_url import without_password
from baton.services.tenants import redis_keys
from baton.services.tenants.model import Book, BookError, book_of
from baton.services.tenants.shared import URL_KEY, connect

CALL_S = 5.0  # no request waits for these calls
EDIT_TRIES = 10  # if others edit at the same time


class RedisBook:
    """The key book in Redis. A check for changes is one HGET of a few bytes."""

    def __init__(self, url: str, topic: str, password: str = "", *, for_router: bool = False) -> None:
        """for_router: write the probe key; other users may write only the book."""
        self.place = f"{without_password(url)}, topic {topic!r} (router.keys_store)"
        self._url = without_password(url)
        self._client: Redis = connect(url, topic, CALL_S, password)
        self._probe = redis_keys.probe(topic) if for_router else ""
        self._key = redis_keys.book(topic)
        self._seen: bytes | None = None  # the version that was last read

    async def changed(self) -> Book | None:
        """Return the book if it changed since the last call. Raises BookError."""
        version, content = await self._fetch(self._seen)
        if version is None:  # e.g. a Redis that was restarted empty
            raise BookError(f"{self.place}: holds no keys: add one with `baton key add`")
        if version == self._seen:
            return None
        self._seen = version
        return self._parse(content)

    async def edit(self, change: Callable[[Book], Book]) -> None:
        """Change the book atomically. Raises BookError."""
        for _ in range(EDIT_TRIES):
            try:
                async with self._client.pipeline(transaction=True) as pipe:
                    await pipe.watch(self._key)
                    held = await cast(Awaitable[Any], pipe.hget(self._key, "book"))
                    book = change(self._parse(held) if held else Book())
                    pipe.multi()  # type: ignore[no-untyped-call]
                    content = book.model_dump_json(exclude_defaults=True)
                    pipe.hset(self._key, items=["version", uuid.uuid4().hex, "book", content])
                    await pipe.execute()
                    return
            except WatchError:
                continue
            except (RedisError, OSError) as error:
                raise self._away(error) from None
        raise BookError(f"{self.place}: {EDIT_TRIES} tries collided with other changes; try again")

    async def close(self) -> None:
        await redis_link.hang_up(self._client)

    async def _fetch(self, seen: bytes | None) -> tuple[bytes | None, bytes]:
        try:
            async with self._client.pipeline(transaction=False) as pipe:
                if self._probe:
                    pipe.set(self._probe, "", px=redis_keys.PROBE_KEEP_MS)
                pipe.hget(self._key, "version")
                version = (await pipe.execute())[-1]
            if version is None or version == seen:
                return version, b""
            version, content = await cast(Awaitable[Any], self._client.hmget(self._key, ["version", "book"]))
        except (RedisError, OSError) as error:
            raise self._away(error) from None
        return version, content or b""

    def _parse(self, content: bytes) -> Book:
        try:
            return book_of(json.loads(content))
        except (BookError, ValueError, RecursionError) as error:
            raise BookError(f"{self.place}: the book is damaged: {error}") from None

    def _away(self, error: Exception) -> BookError:
        redis_link.renew(self._client)  # it may have become the wrong server
        if refused := refusal(self._client, self._url, error, URL_KEY):
            return BookError(f"{self.place}: {refused}")
        # The error's own text is left out, because it varies and the same problem is logged once.
        return BookError(f"{self.place}: no answer ({type(error).__name__})")
