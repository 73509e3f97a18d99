"""Stores of a topic's state, chosen by URL."""

from __future__ import annotations

from baton.scheduler.errors import StoreUnavailable
from baton.scheduler.store.base import Store

__all__ = ["Store", "open_store"]


def open_store(url: str, topic: str) -> Store:
    """`memory`, or `redis://[:password@]host:port/db`, `rediss://` for TLS. Connects lazily.

    Raises StoreUnavailable when the URL makes no sense.
    """
    if url == "memory":
        from baton.scheduler.store.memory import MemoryStore

        return MemoryStore(topic)
    if url.startswith(("redis://", "rediss://")):
        from baton.scheduler.store.redis import RedisStore

        return RedisStore(url, topic)
    scheme = url.partition("://")[0]
    raise StoreUnavailable(f"scheduler.store {scheme!r} is unknown: use memory, redis:// or rediss://")
