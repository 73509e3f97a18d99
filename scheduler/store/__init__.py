"""Open the store of schedulers' shared state, chosen by URL."""

from __future__ import annotations

from baton.redis_url import KINDS, is_redis
from baton.scheduler.errors import StoreRefuses
from baton.scheduler.store.base import Store
from baton.scheduler.store.memory import MemoryStore

__all__ = ["Store", "open_store"]


def open_store(url: str, topic: str, password: str = "") -> Store:
    """Return the store that a URL names: `memory`, or a Redis (`redis_url.FORM`).

    `password` is for a URL without one. Raises StoreRefuses for an invalid URL.
    """
    if url == "memory":
        return MemoryStore()
    if is_redis(url):
        from baton.scheduler.store.redis import RedisStore

        return RedisStore(url, topic, password)
    scheme, separator, _ = url.partition("://")
    named = f" {scheme!r}" if separator else ""  # without a scheme, all of it may be a secret
    raise StoreRefuses(f"scheduler.store{named} is unknown: use memory, {KINDS}")
