"""Check Redis from this machine: whether it answers, its latency, and Baton's permissions."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from redis.exceptions import NoPermissionError, RedisError, ResponseError

from baton.errors import BatonError
from baton.redis_errors import elsewhere, hide_password
from baton.redis_link import hang_up
from baton.redis_url import FORM, without_password
from baton.scheduler.store.redis import RedisStore
from baton.services import credentials
from baton.services.config import Settings
from baton.services.diagnosis.finding import About, Finding
from baton.services.tenants.redis_book import RedisBook
from baton.services.tenants.shared import connect

AREA = "Redis"
TIMEOUT_S = 2.0
SLOW_MS = 10.0
PINGS = 10
KEEPS = "noeviction"

Use = Callable[[About, Settings, str], Awaitable[Finding]]


async def findings(settings: Settings) -> AsyncIterator[Finding]:
    """Yield findings on the scheduler's store and the store of keys."""
    own, router = settings.scheduler, settings.router
    stores: list[tuple[str, str, Callable[[], str], Use | None]] = [
        ("scheduler.store", own.store, lambda: credentials.store_password(own), _store),
        (
            "router.keys_store",
            router.keys_store,
            lambda: credentials.keys_store_password(router),
            None if router.keys_file else _keys,
        ),
    ]
    for key, url, password_of, use in stores:
        if url in ("", "memory"):
            continue
        about, password = About(AREA, key), password_of()
        async for one in _look(about, url, own.topic, password):
            yield one
            if one.verdict == "wrong":
                break
        else:
            if use:
                yield await use(about, settings, password)


async def _look(about: About, url: str, topic: str, password: str) -> AsyncIterator[Finding]:
    key = about.subject
    try:
        client = connect(url, topic, TIMEOUT_S, password)
    except BatonError:
        yield about.wrong("not a Redis URL", f"write {FORM} into {key}")
        return
    where = without_password(url)
    try:
        times = []
        for _ in range(PINGS):
            began = time.perf_counter()
            await client.time()
            times.append((time.perf_counter() - began) * 1e3)
        hello = _pairs(await client.execute_command("HELLO"))  # type: ignore[no-untyped-call]
        median = statistics.median(times)
        what = f"{where}: version {hello.get('version', '?')}, {_mode(hello)}{median:.2f} ms a call"
        if hello.get("role") not in ("master", None):
            cure = f"point {key} at the master; redis+sentinel:// and redis+cluster:// find it themselves"
            yield about.wrong(f"{where}: is a replica, and takes no writes", cure)
            return
        if median > SLOW_MS:
            yield about.warning(f"{what}: it is far away or busy", "move Redis closer to its clients")
        else:
            yield about.ok(what)
        yield await _policy(about, client)
    except (RedisError, OSError, TimeoutError) as error:
        text = hide_password(client, str(error) or type(error).__name__)
        if words := elsewhere(error, where, key):
            what, _, cure = hide_password(client, words).partition(": ")
            yield about.wrong(f"{where} {what}", cure or "see its log")
            return
        cure = f"check that it is up, {key}, its password, and its ACL (docs/security.md lists what it needs)"
        yield about.wrong(f"{where} does not answer as it should: {text}", cure)
    finally:
        await hang_up(client)


async def _policy(about: About, client: Any) -> Finding:
    try:
        memory: dict[str, Any] = await client.info("memory")
    except (NoPermissionError, ResponseError):
        return about.ok(f"this user may not read maxmemory-policy: it must be {KEEPS}")
    policy, most = str(memory.get("maxmemory_policy", "?")), int(memory.get("maxmemory", 0))
    what = f"maxmemory-policy {policy}, maxmemory {most or 'unlimited'}"
    if most and policy != KEEPS:
        problem = f"{what}: when it is full, it evicts Baton's data"
        return about.wrong(problem, f"set maxmemory-policy to {KEEPS}")
    return about.ok(what)


async def _store(about: About, settings: Settings, password: str) -> Finding:
    own = settings.scheduler
    try:
        store = RedisStore(own.store, own.topic, password)
    except BatonError as error:
        return about.wrong(str(error), "write a Redis URL")
    try:
        await store.check()
    except BatonError as error:
        cure = "give its user the rights of docs/security.md, for the keys of this topic"
        return about.wrong(str(error), cure)
    finally:
        await store.close()
    return about.ok("the user may run the scheduler's scripts")


async def _keys(about: About, settings: Settings, password: str) -> Finding:
    book = RedisBook(settings.router.keys_store, settings.scheduler.topic, password)
    try:
        held = await asyncio.wait_for(book.changed(), TIMEOUT_S)
    except (BatonError, RedisError, OSError, TimeoutError) as error:
        return about.wrong(f"the keys cannot be read: {error}", "see docs/tenants.md")
    finally:
        await book.close()
    return about.ok(f"{len(held.keys) if held else 0} keys of topic {settings.scheduler.topic!r}")


def _mode(hello: dict[str, Any]) -> str:
    mode = hello.get("mode", "standalone")
    return "" if mode == "standalone" else f"mode {mode}, "


def _pairs(reply: Any) -> dict[str, Any]:
    items = reply.items() if isinstance(reply, dict) else zip(reply[::2], reply[1::2], strict=False)
    return {_text(name): _text(value) for name, value in items}


def _text(value: Any) -> Any:
    return value.decode() if isinstance(value, bytes) else value
