"""The store in Redis, which several schedulers can share.

Each method of the interface is one Lua script (`scripts/`), and therefore atomic.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from typing import Any

from redis.exceptions import BusyLoadingError, InvalidResponse, OutOfMemoryError, RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from baton import redis_link
from baton.redis_errors import hide_password, leads_elsewhere, refusal, refuses_the_user
from baton.redis_url import not_a_url, without_password
from baton.scheduler.errors import StoreRefuses, StoreUnavailable
from baton.scheduler.store.base import TOLD_KINDS, Store
from baton.scheduler.types import Told
from baton.tasks import patiently

CALL_TIMEOUT_S = 0.9  # limit for connecting and running the script
SCRIPTS = ("drains", "tell", "lead", "told", "order")
AWAY = "the store is down"  # logged once per outage

log = logging.getLogger(__name__)

# Name in the scripts -> last part of the key. All keys of a topic begin with `baton:{TOPIC}:`; the braces
# keep them in one slot of a Redis Cluster, so one script can change them together. Times are Redis' TIME, ms.
KEYS = {
    "DRAINS": "drains",  # HASH name -> how often an operator drained or undrained it: odd while it is drained
    "TOLD": "told",  # HASH KIND:ID -> a sender's last message; kinds: router, fleet, process, turns
    "TOLD_LEASES": "told:leases",  # ZSET field of TOLD -> when it expires
    "DECIDER": "decider",  # HASH who, fence, until: the scheduler that autoscales; tended: the last check
    "ORDERS": "orders",  # HASH fleet:ID -> what should run in its places, serialized
}
TOPIC_TTL_MS = 3_600_000  # lifetime of an idle topic's keys, except its drains
DRAINS_TTL_MS = 30 * 86_400_000  # longer, because only an operator could repeat them


def topic_keys(topic: str) -> list[str]:
    return [f"baton:{{{topic}}}:{suffix}" for suffix in KEYS.values()]


def lua_header() -> str:
    """Return Lua declarations of the keys and constants, to put before each script."""
    lines = [f"local {name} = KEYS[{number}]" for number, name in enumerate(KEYS, start=1)]
    constants = {"TOPIC_TTL_MS": TOPIC_TTL_MS, "DRAINS_TTL_MS": DRAINS_TTL_MS}
    return "\n".join([*lines, *(f"local {name} = {value}" for name, value in constants.items())])


class RedisStore(Store):
    """A store in Redis. It never retries a call, because the script may have run although no reply came."""

    def __init__(self, url: str, topic: str, password: str = "") -> None:
        super().__init__()
        self.name = without_password(url)
        self._host = self.name.partition("://")[2].partition("/")[0]  # shown in messages
        self._keys = topic_keys(topic)
        try:
            # `_run` has the timeout.
            self._client = redis_link.connect(url, self._keys[0], password=password, max_connections=1)
        except ValueError:  # the original text may quote a password
            raise StoreRefuses(not_a_url("scheduler.store")) from None
        self._scripts = {name: self._client.register_script(_source(name)) for name in SCRIPTS}
        self._calling = asyncio.Lock()  # one connection is enough: Redis runs one script at a time

    async def open(self) -> None:
        try:
            await self.check()
        except StoreRefuses:
            raise
        except StoreUnavailable as error:
            self._lose(error)

    async def tend(self) -> None:
        try:
            await self.check()
        except StoreUnavailable as error:
            self._lose(error)
            return
        if self.problem:
            log.warning("the store at %s is back", self.name)
        self.problem = ""

    async def tell(self, kind: str, who: str, message: bytes, lease_s: float) -> bytes:
        return await self._ask("tell", f"{kind}:{who}", message, _milliseconds(lease_s)) or b""

    async def lead(self, who: str, for_s: float) -> int:
        return int(await self._ask("lead", who, _milliseconds(for_s)) or 0)

    async def told(self) -> Told:
        reply = await self._ask("told")
        if reply is None:
            return Told()
        messages, orders = reply
        by_kind: dict[str, dict[str, bytes]] = {kind: {} for kind in TOLD_KINDS}
        for key, message in _pairs(messages):
            kind, _, who = key.partition(":")
            by_kind[kind][who] = message
        by_fleet = {key.removeprefix("fleet:"): raw for key, raw in _pairs(orders)}
        return Told(by_kind["router"], by_kind["fleet"], by_fleet, by_kind["process"], by_kind["turns"])

    async def order(self, fence: int, orders: Mapping[str, bytes]) -> bool:
        flat = [part for fleet, raw in orders.items() for part in (f"fleet:{fleet}", raw)]
        return bool(await self._ask("order", fence, *flat))

    async def close(self) -> None:
        await redis_link.hang_up(self._client)

    async def check(self) -> None:
        """Exchange drains with the store. Raises StoreUnavailable, StoreRefuses."""
        mine = [part for name, count in self._drains.items() for part in (name, count)]
        async with self._calling:
            known = await self._run("drains", *mine)
        for name, count in _pairs(known):
            self._drains[name] = max(int(count), self._drains.get(name, 0))

    async def _ask(self, name: str, *arguments: str | int | bytes) -> Any:
        if self.problem:  # do not wait for a check, which may run into its timeout
            return None
        async with self._calling:
            if self.problem:  # the connection was lost while this call waited
                return None
            try:
                return await self._run(name, *arguments)
            except StoreUnavailable as error:
                self._lose(error)
                return None

    def _lose(self, error: StoreUnavailable) -> None:
        if not self.problem:
            log.warning("%s: %s", AWAY, error)
        self.problem = str(error)

    async def _run(self, name: str, *arguments: str | int | bytes) -> Any:
        try:
            script = self._scripts[name](self._keys, arguments)
            return await patiently(script, CALL_TIMEOUT_S)
        except (RedisError, OSError, TimeoutError) as error:
            redis_link.renew(self._client)  # it may be connected to the wrong server
            kind = StoreRefuses if _for_good(error) or leads_elsewhere(error, self.name) else StoreUnavailable
            text = refusal(self._client, self.name, error, "scheduler.store") or _explain(error)
            raise kind(f"redis at {self._host} {hide_password(self._client, text)}") from None


def _pairs(flat: Sequence[bytes]) -> Iterator[tuple[str, bytes]]:
    return zip((key.decode() for key in flat[::2]), flat[1::2], strict=True)


def _milliseconds(seconds: float) -> int:
    return max(1, round(1_000 * seconds))


def _source(name: str) -> str:
    folder = files(__package__) / "scripts"
    parts = (folder / f"{part}.lua" for part in ("prelude", name))
    return "\n".join([lua_header(), *(part.read_text("utf-8") for part in parts)])


def _is_nobodys_name(error: BaseException) -> bool:
    """Return whether the host name does not exist. A temporary DNS failure may be part of an outage."""
    cause = error.__cause__ or error.__context__ or error
    return isinstance(cause, socket.gaierror) and cause.errno == socket.EAI_NONAME


def _for_good(error: BaseException) -> bool:
    wrong_database = "DB index is out of range" in str(error)
    no_redis = isinstance(error, InvalidResponse)
    return refuses_the_user(error) or _is_nobodys_name(error) or wrong_database or no_redis


def _explain(error: BaseException) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, BusyLoadingError):
        return "is still loading its data, and will answer after that"
    if isinstance(error, OutOfMemoryError):
        return f"is full ({text}); raise its maxmemory"
    if isinstance(error, TimeoutError | RedisTimeoutError):
        return "does not answer in time; is it up, and is this the right address?"
    if isinstance(error, ConnectionError | OSError) or type(error).__name__ == "ConnectionError":
        return f"does not answer ({text}); is it up, and is this the right address?"
    return f"refused a command: {text}"
