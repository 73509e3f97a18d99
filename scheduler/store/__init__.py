"""The store of the schedulers' shared state."""

from __future__ import annotations

from baton.redis_url import KINDS, is_redis
from baton.scheduler.errors import StoreRefuses
from baton.scheduler.store.base import MemoryStore, Store

__all__ = ["Store", "open_store"]


def open_store(url: str, topic: str, password: str = "") -> Store:
    """Return the store for `memory` or a Redis URL. `password` replaces the URL's. Raises StoreRefuses."""
    if url == "memory":
        return MemoryStore()
    if is_redis(url):
        from baton.scheduler.store.redis import RedisStore

        return RedisStore(url, topic, password)
    scheme, separator, _ = url.partition("://")
    named = f" {scheme!r}" if separator else ""  # without a scheme, the text may be a secret
    raise StoreRefuses(f"scheduler.store{named} is unknown: use memory, {KINDS}")
