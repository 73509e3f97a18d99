"""Checks of Redis from this machine: whether it answers, how soon, and whether Baton's rights suffice."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator
from typing import Any

from redis.exceptions import NoPermissionError, RedisError, ResponseError

from baton.errors import BatonError
from baton.redis_elsewhere import elsewhere
from baton.redis_link import hang_up
from baton.redis_url import FORM, without_password
from baton.scheduler.store.redis import RedisStore
from baton.services import credentials
from baton.services.config import Settings
from baton.services.diagnosis.finding import Finding, ok, warning, wrong
from baton.services.tenants.redis_book import RedisBook
from baton.services.tenants.shared import connect

AREA = "Redis"
TIMEOUT_S = 2.0
SLOW_MS = 10.0
PINGS = 10
KEEPS = "noeviction"


async def findings(settings: Settings) -> AsyncIterator[Finding]:
    """Yield findings on the scheduler's store and the store of keys."""
    own, router = settings.scheduler, settings.router
    if own.store != "memory":
        password = credentials.store_password(own)
        async for one in _look("scheduler.store", own.store, own.topic, password):
            yield one
            if one.verdict == "wrong":
                break
        else:
            yield await _store(settings, password)
    if router.keys_store:
        password = credentials.keys_store_password(router)
        async for one in _look("router.keys_store", router.keys_store, own.topic, password):
            yield one
            if one.verdict == "wrong":
                break
        else:
            if not router.keys_file:
                yield await _keys(settings, password)


async def _look(key: str, url: str, topic: str, password: str) -> AsyncIterator[Finding]:
    """Yield findings on the server itself."""
    try:
        client = connect(url, topic, TIMEOUT_S, password)
    except BatonError:
        yield wrong(AREA, key, "not a Redis URL", f"write {FORM} into {key}")
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
            cure = f"let {key} lead to the master; redis+sentinel:// and redis+cluster:// find it themselves"
            yield wrong(AREA, key, f"{where}: is a replica, and takes no writes", cure)
            return
        if median > SLOW_MS:
            yield warning(AREA, key, f"{what}: it is far away or busy", "put Redis nearer to its clients")
        else:
            yield ok(AREA, key, what)
        yield await _policy(key, client)
    except (RedisError, OSError, TimeoutError) as error:
        text = _hidden(str(error) or type(error).__name__, client)
        if words := elsewhere(error, where, key):
            what, _, cure = _hidden(words, client).partition(": ")
            yield wrong(AREA, key, f"{where} {what}", cure or "see its log")
            return
        yield wrong(
            AREA,
            key,
            f"{where} does not answer as it should: {text}",
            f"is it up, are {key} and its password right, does its ACL allow what docs/security.md lists?",
        )
    finally:
        await hang_up(client)


async def _policy(key: str, client: Any) -> Finding:
    try:
        memory: dict[str, Any] = await client.info("memory")
    except (NoPermissionError, ResponseError):
        return ok(AREA, key, f"this user may not ask for maxmemory-policy: it has to be {KEEPS}")
    policy, most = str(memory.get("maxmemory_policy", "?")), int(memory.get("maxmemory", 0))
    what = f"maxmemory-policy {policy}, maxmemory {most or 'unlimited'}"
    if most and policy != KEEPS:
        return wrong(
            AREA,
            key,
            f"{what}: when it is full, it throws away what Baton keeps there",
            f"set maxmemory-policy to {KEEPS}",
        )
    return ok(AREA, key, what)


async def _store(settings: Settings, password: str) -> Finding:
    """Try what a scheduler does twice a second, with its scripts and its user."""
    key, own = "scheduler.store", settings.scheduler
    try:
        store = RedisStore(own.store, own.topic, password)
    except BatonError as error:
        return wrong(AREA, key, str(error), "write a Redis URL")
    try:
        await store.check()
    except BatonError as error:
        return wrong(
            AREA, key, str(error), "give its user the rights of docs/security.md, for the keys of this topic"
        )
    finally:
        await store.close()
    return ok(AREA, key, "the user may run the scheduler's scripts")


async def _keys(settings: Settings, password: str) -> Finding:
    key = "router.keys_store"
    book = RedisBook(settings.router.keys_store, settings.scheduler.topic, password)
    try:
        held = await asyncio.wait_for(book.changed(), TIMEOUT_S)
    except (BatonError, RedisError, OSError, TimeoutError) as error:
        return wrong(AREA, key, f"the keys cannot be read: {error}", "see docs/tenants.md")
    finally:
        await book.close()
    return ok(AREA, key, f"{len(held.keys) if held else 0} keys of topic {settings.scheduler.topic!r}")


def _mode(hello: dict[str, Any]) -> str:
    mode = hello.get("mode", "standalone")
    return "" if mode == "standalone" else f"mode {mode}, "


def _pairs(reply: Any) -> dict[str, Any]:
    """Return HELLO's reply, a mapping in protocol 3 and a flat list in 2."""
    items = reply.items() if isinstance(reply, dict) else zip(reply[::2], reply[1::2], strict=False)
    return {_text(name): _text(value) for name, value in items}


def _text(value: Any) -> Any:
    return value.decode() if isinstance(value, bytes) else value


def _hidden(text: str, client: Any) -> str:
    """Remove the password, as a server repeats the arguments of an unknown command."""
    password = client.connection_pool.connection_kwargs.get("password")
    return text.replace(password, "***") if password else text
