"""The Redis that routers share. While it is unreachable, no request fails because of it or waits for long."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from importlib.resources import files
from typing import Any, TypeVar

from redis.asyncio import Redis
from redis.commands.core import AsyncScript
from redis.exceptions import RedisError

from baton import redis_link
from baton.keeping import keep
from baton.redis_errors import refusal
from baton.redis_url import not_a_url, without_password
from baton.services.errors import ConfigError
from baton.services.tenants import redis_keys
from baton.tasks import patiently, stop

URL_KEY = "router.keys_store"
CALL_S = 0.5  # a call's timeout, which limits how long a request waits for a hung Redis
PROBE_S = 1.0  # between two attempts to reach a Redis that is down
MAX_CONNECTIONS = 16
MAX_LATER = 10_000  # queued background calls; further ones are dropped

T = TypeVar("T")
Call = Callable[[], Coroutine[Any, Any, object]]

log = logging.getLogger(__name__)


def connect(url: str, topic: str, timeout_s: float | None, password: str = "") -> Redis:
    """Return a client for the server with the topic's keys (redis_link.connect). Raises ConfigError."""
    try:
        return redis_link.connect(
            url,
            redis_keys.prefix(topic),
            password=password,
            max_connections=MAX_CONNECTIONS,
            timeout_s=timeout_s,
        )
    except ValueError:  # its message may quote a password
        raise ConfigError(not_a_url(URL_KEY)) from None


class SharedStore:
    """Calls Redis, and tracks whether it answers. Not thread-safe."""

    def __init__(self, url: str, topic: str, password: str = "") -> None:
        self.topic = topic
        self.client = connect(url, topic, None, password)
        self.up = True
        self._told = False  # the outage has been logged (the probe may succeed while calls are refused)
        self._name = without_password(url)
        self._later: asyncio.Queue[Call] = asyncio.Queue(MAX_LATER)
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [
            keep(self._probe, "look for the routers' Redis"),
            keep(self._make_calls, "calls of the routers' Redis"),
        ]

    async def close(self) -> None:
        """Make the remaining background calls within CALL_S, and close the connections."""
        try:
            async with asyncio.timeout(CALL_S):
                await self._later.join()
        except TimeoutError:
            log.warning("%d calls of %s were not made", self._later.qsize(), self._name)
        for task in self._tasks:
            await stop(task)
        await redis_link.hang_up(self.client)

    def script(self, name: str) -> AsyncScript:
        return self.client.register_script(files(__package__).joinpath("scripts", f"{name}.lua").read_text())

    async def call(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T | None:
        """Make a call and return its result, or None while Redis is unreachable."""
        if not self.up:
            return None
        try:
            reply = await patiently(make(), CALL_S)
        except (RedisError, OSError, TimeoutError) as error:
            self._lost(error)
            return None
        if self._told:
            self._told = False
            log.info("%s is back: limits are shared again", self._name)
        return reply

    def later(self, make: Call) -> None:
        """Make a call in the background. The call is dropped while Redis is unreachable."""
        if self.up and not self._later.full():
            self._later.put_nowait(make)

    def _lost(self, error: Exception) -> None:
        self.up = False
        redis_link.renew(self.client)  # other connections may lead to the same wrong or silent server
        if not self._told:
            self._told = True
            why = refusal(self.client, self._name, error, URL_KEY) or str(error) or type(error).__name__
            log.error("%s is down (%s): limits are this router's own until it is back", self._name, why)

    async def _make_calls(self) -> None:
        while True:
            make = await self._later.get()
            try:
                await self.call(make)
            finally:
                self._later.task_done()

    async def _probe(self) -> None:
        while True:
            await asyncio.sleep(PROBE_S)
            if self.up:
                continue
            try:
                # A write: a replica would answer anything else.
                await patiently(self._write(), CALL_S)
            except (RedisError, OSError, TimeoutError):
                redis_link.renew(self.client)
                continue
            self.up = True

    async def _write(self) -> None:
        await self.client.set(redis_keys.probe(self.topic), "", px=redis_keys.PROBE_KEEP_MS)
