"""Redis clients for one server, for the master that Sentinels name, or for the cluster node that owns a slot.

Each is a redis-py client with a pool that looks up the server for each new connection. After an error all
connections are replaced (`renew`), because they may by then lead to the wrong server. Nothing is retried, and
no redirection is followed. One node of a cluster is enough, because all keys of a topic are in one slot
(`baton.scheduler.store.redis`).

Internals of redis-py used here: BlockingConnectionPool (ensure_connection, release, make_connection,
_get_free_connections, _get_in_use_connections), Connection.connect_check_health, connection.parse_url,
Sentinel.discover_master, RedisCluster's nodes_manager (initialize, aclose), get_node_from_key and get_nodes.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.connection import AbstractConnection, Connection, SSLConnection, parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import MasterNotFoundError, Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisClusterException, RedisError
from redis.maint_notifications import MaintNotificationsConfig

from baton.redis_url import CLUSTER, PASSWORD_FILE, REDIS, SENTINEL

FIND_S = 0.25  # time limit of one Sentinel or node; short enough to ask several
SENTINEL_PORT = 26379
_SENTINELS_OWN = ("sentinel_username", "sentinel_password")

Address = tuple[str, int]


class NotACluster(RedisError):
    """The server has no cluster mode."""


class _Finder(Protocol):
    async def find(self) -> Address: ...
    async def close(self) -> None: ...


@dataclass(frozen=True)
class RedisPlace:
    """The parts of a URL. Its repr shows no password."""

    scheme: str
    hosts: tuple[Address, ...]
    service: str  # the master's name, with Sentinels
    options: dict[str, Any] = field(repr=False)  # redis-py's connection options
    sentinel_options: dict[str, Any] = field(repr=False)

    @classmethod
    def of(cls, url: str, password: str = "") -> RedisPlace:
        """Parse a URL; `password` replaces the one in it. Raises ValueError, which may quote the password."""
        scheme, separator, rest = url.partition("://")
        if not separator or scheme not in (*REDIS, *SENTINEL, *CLUSTER):
            raise ValueError("not a Redis URL")
        netloc = re.split("[/?#]", rest, maxsplit=1)[0]
        parts = urlsplit(f"//host{rest.removeprefix(netloc)}")  # urlsplit may reject lists of hosts
        credentials, at, places = netloc.rpartition("@")
        usual = SENTINEL_PORT if scheme in SENTINEL else 6379
        named = places.split(",") if scheme not in REDIS else [places or "localhost"]
        hosts = tuple(_host(place, usual) for place in named)
        service, database = "", parts.path.strip("/")
        if scheme in SENTINEL:
            service, _, database = database.partition("/")
            if not service:
                raise ValueError("the master's name is missing")
        own = dict(pair for pair in parse_qsl(parts.query) if pair[0] in _SENTINELS_OWN)
        others = [pair for pair in parse_qsl(parts.query) if pair[0] not in (*own, PASSWORD_FILE)]
        query = urlencode(others)
        if "#" in rest:
            raise ValueError("a # must be percent-encoded")
        plain = f"{scheme.partition('+')[0]}://{credentials}{at}/{database}?{query}"
        options: dict[str, Any] = {**parse_url(plain)}
        options.pop("connection_class", None)
        if scheme in CLUSTER and options.get("db"):
            raise ValueError("a Redis Cluster has no databases")
        options |= {"password": password} if password else {}
        sentinel = {name: value for name, value in options.items() if name.startswith("ssl")}
        sentinel |= {name.removeprefix("sentinel_"): value for name, value in own.items()}
        return cls(scheme, hosts, unquote(service), options, sentinel)

    @property
    def tls(self) -> bool:
        """Whether connections are encrypted, including those to Sentinels."""
        return self.scheme.startswith("rediss")

    def finder(self, key: str) -> _Finder | None:
        """Return a finder for the server that has `key`; None if the URL names the server."""
        if self.scheme in SENTINEL:
            return _Sentinels(self)
        return _Nodes(self, key) if self.scheme in CLUSTER else None


def connect(
    url: str, key: str, *, password: str = "", max_connections: int, timeout_s: float | None = None
) -> Redis:
    """Return a client for the server that has `key`; it connects on first use. Close it with `hang_up`.

    `password` replaces the one in the URL. `timeout_s` limits the wait for a free connection, for connecting
    and for a reply; None if the caller has its own timeout. Raises ValueError, which may quote a password.
    """
    place = RedisPlace.of(url, password)
    host, port = place.hosts[0]
    return Redis(
        connection_pool=Pool(
            place.finder(key),
            **{
                **place.options,
                "connection_class": _TLSConnection if place.tls else _Connection,
                "host": host,
                "port": port,
                "max_connections": max_connections,
                "timeout": timeout_s,
                "socket_timeout": timeout_s,
                "socket_connect_timeout": timeout_s,
                "retry": Retry(NoBackoff(), 0),
                # Otherwise the pool would hand out connections that the server has closed.
                "maint_notifications_config": MaintNotificationsConfig(enabled=False),
            },
        )
    )


def renew(client: Redis) -> None:
    """Replace all connections of a client made by `connect` before their next use."""
    pool = client.connection_pool
    if isinstance(pool, Pool):
        pool.renew()


async def hang_up(client: Redis) -> None:
    """Close a client made by `connect`."""
    try:
        await client.aclose()
        await client.connection_pool.aclose()
    except (RedisError, OSError):
        return  # it was never connected


class Pool(BlockingConnectionPool):
    """A pool that looks up the server for each new connection."""

    def __init__(self, finder: _Finder | None, **options: Any) -> None:
        super().__init__(**options)
        self._finder = finder

    def renew(self) -> None:
        for connection in (*self._get_free_connections(), *self._get_in_use_connections()):
            if isinstance(connection, _Asking):
                connection.stale = True

    def make_connection(self) -> AbstractConnection:
        connection: AbstractConnection = super().make_connection()  # type: ignore[no-untyped-call]
        if self._finder is not None and isinstance(connection, _Asking):
            connection.find = self._finder.find
        return connection

    async def ensure_connection(self, connection: AbstractConnection) -> None:
        if isinstance(connection, _Asking):
            await connection.leave_if_stale()
        await super().ensure_connection(connection)

    async def release(self, connection: AbstractConnection) -> None:
        if isinstance(connection, _Asking):
            await connection.leave_if_stale()
        await super().release(connection)

    async def aclose(self) -> None:
        if self._finder is not None:
            await self._finder.close()
        await super().aclose()


class _Asking(Connection):
    find: Callable[[], Awaitable[Address]] | None = None
    stale = False  # reconnect before the next use

    async def leave_if_stale(self) -> None:
        """Close a stale connection, without waiting for the server, which may not answer."""
        if self.stale:
            self.stale = False
            await self.disconnect(nowait=True)

    async def connect_check_health(
        self, check_health: bool = True, retry_socket_connect: bool = True
    ) -> None:
        if self.find is not None and not self.is_connected:
            self.host, self.port = await self.find()
        await super().connect_check_health(check_health, retry_socket_connect)


class _Connection(_Asking):
    pass


class _TLSConnection(_Asking, SSLConnection):
    pass


class _Sentinels:
    def __init__(self, place: RedisPlace) -> None:
        self._place = place
        self._names = ", ".join(f"{host}:{port}" for host, port in place.hosts)
        self._sentinel = Sentinel(
            list(place.hosts), sentinel_kwargs={**_of_a_finder(place), **place.sentinel_options}
        )  # type: ignore[no-untyped-call]

    async def find(self) -> Address:
        try:
            host, port = await self._sentinel.discover_master(self._place.service)
        except MasterNotFoundError as error:
            # redis-py appends each Sentinel's problem. If there is none, all of them have answered.
            why = "do they run?" if " : " in str(error) else "is that its name, and is it up?"
            raise RedisConnectionError(
                f"no Sentinel of {self._names} names a master {self._place.service!r}; {why}"
            ) from None
        return str(host), int(port)

    async def close(self) -> None:
        await self._sentinel.aclose()


class _Nodes:
    def __init__(self, place: RedisPlace, key: str) -> None:
        self._place = place
        self._key = key
        self._known: list[Address] = []  # the cluster's nodes when last connected

    async def find(self) -> Address:
        nodes = dict.fromkeys((*self._known, *self._place.hosts))
        cluster = None
        try:
            cluster = RedisCluster(
                startup_nodes=[ClusterNode(host, port) for host, port in nodes],
                require_full_coverage=False,  # one slot is enough
                **{**self._place.options, **_of_a_finder(self._place)},
            )
            # The cluster's own `initialize` would also fetch the table of all commands.
            await cluster.nodes_manager.initialize()
            node = cluster.get_node_from_key(self._key)
            self._known = [(str(one.host), int(one.port)) for one in cluster.get_nodes()]
        except RedisClusterException as error:  # not a RedisError
            raise _reason(error) from None
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            # raised by redis-py for a node without slots, or for options that only other clients have
            why = f"{type(error).__name__}: {error}"
            raise RedisConnectionError(f"no node reports the cluster's slots ({why})") from None
        finally:
            if cluster is not None:
                await cluster.nodes_manager.aclose()
                await cluster.nodes_manager.aclose("startup_nodes")
        if node is None:
            raise RedisConnectionError("no node of the cluster has the topic's slot")
        return str(node.host), int(node.port)

    async def close(self) -> None:
        pass


def _reason(error: RedisClusterException) -> RedisError:
    """Return why no node described the cluster: the cause of redis-py's general error."""
    cause = error.__cause__
    if isinstance(cause, RedisClusterException):
        refusal = cause.__context__
        if "cluster support disabled" in str(refusal):
            return NotACluster(str(refusal))
        cause = refusal
    if isinstance(cause, RedisError):
        return cause
    return RedisConnectionError(" ".join(str(error).split()))


def _of_a_finder(place: RedisPlace) -> dict[str, Any]:
    return {
        "ssl": place.tls,
        "socket_timeout": FIND_S,
        "socket_connect_timeout": FIND_S,
        "retry": Retry(NoBackoff(), 0),
        "maint_notifications_config": MaintNotificationsConfig(enabled=False),
    }


def _host(text: str, usual: int) -> Address:
    parts = urlsplit(f"//{text}")
    if not parts.hostname or "@" in text:
        raise ValueError("a host is missing")
    return unquote(parts.hostname), parts.port or usual
