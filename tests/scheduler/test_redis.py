"""The store in Redis, with two schedulers and a server that dies, hangs, is full or refuses the user."""

import asyncio
import logging
import socket
import time
from contextlib import asynccontextmanager

import pytest
from redis.asyncio import Redis

from baton.scheduler.errors import StoreUnavailable
from baton.scheduler.store import open_store, redis
from baton.scheduler.store.redis import (
    AWAY,
    CALL_TIMEOUT_S,
    DRAINS_TTL_MS,
    TOPIC_TTL_MS,
    RedisStore,
    topic_keys,
)
from baton.scheduler.types import Told
from harness.scheduling import LEASE_S, RedisServer, until
from harness.support import CALL_S
from tests.scheduler.conftest import opened, recovered, refused

NAMES = [f"{ours}{theirs}" for ours in range(4) for theirs in range(4)]


@pytest.fixture
async def stores(own_redis, monkeypatch):
    """The stores of two schedulers over one Redis."""
    monkeypatch.setattr(redis, "CALL_TIMEOUT_S", CALL_S)
    async with opened(own_redis.url) as made:
        yield made


# -- shared


async def test_a_drain_is_known_to_all_schedulers(own_redis, stores):
    one, other = stores
    assert await one.drain("w")
    assert not await other.drain("w")
    assert other.drained == {"w"}
    assert await other.drain("w", undo=True)
    await one.tend()
    assert one.drained == frozenset()
    assert await one.drain("kept")
    async with opened(own_redis.url, 1) as (late,):
        assert late.drained == {"kept"}


async def test_the_latest_drain_or_undrain_wins(own_redis, stores):
    """Both drain and undrain names without Redis, which is then empty."""
    one, other = stores
    own_redis.stop()
    for name in NAMES:
        for store, words in ((one, int(name[0])), (other, int(name[1]))):
            for word in range(words):
                assert await store.drain(name, undo=bool(word % 2))
    own_redis.start()
    await recovered([one, other, one])
    drained = {name for name in NAMES if max(int(name[0]), int(name[1])) % 2}
    assert one.drained == other.drained == drained


async def test_topics_are_separate(own_redis):
    one, two = RedisStore(own_redis.url, "one"), RedisStore(own_redis.url, "two")
    await one.drain("w")
    await one.tell("router", "r", b"here", LEASE_S)
    assert await one.lead("me", LEASE_S)
    await two.open()
    assert (two.drained, await two.told()) == (frozenset(), Told())
    assert await two.lead("you", LEASE_S)
    await one.close()
    await two.close()


async def test_every_key_has_the_prefix_and_a_time_to_live(own_redis, stores):
    store = stores[0]
    await use(store)
    admin = Redis.from_url(own_redis.url, decode_responses=True)
    keys = [key async for key in admin.scan_iter()]
    assert sorted(keys) == sorted(topic_keys("t"))
    assert all(key.startswith("baton:{t}:") for key in keys)
    for key in keys:
        longest = DRAINS_TTL_MS if key.endswith(":drains") else TOPIC_TTL_MS
        assert longest / 2 < await admin.pttl(key) <= longest, key
    await admin.aclose()


async def test_concurrent_calls_get_their_own_replies(own_redis, stores):
    store = stores[0]
    async with Redis.from_url(own_redis.url) as admin:
        await admin.script_flush()  # the scripts are loaded again, and no call runs twice
    left = asyncio.create_task(store.lead("left", LEASE_S))
    asking = [asyncio.create_task(store.lead(f"{number % 25}", LEASE_S)) for number in range(50)]
    left.cancel()  # before it is sent
    fences = [bool(fence) for fence in await asyncio.gather(*asking)]
    assert fences == ([True] + [False] * 24) * 2
    assert not store.problem


# -- unreachable


async def use(store):
    """Make every call that a scheduler makes."""
    await store.drain("d")
    fence = await store.lead("me", LEASE_S)
    return [
        bool(fence),
        await store.order(fence, {"f": b"orders"}),
        await store.tell("fleet", "f", b"here", LEASE_S),
        dict((await store.told()).fleets),
    ]


WELL = [True, True, b"orders", {"f": b"here"}]
NOTHING = [False, False, b"", {}]


@asynccontextmanager
async def dead(server):
    server.stop()
    yield "does not answer"
    server.start()  # empty


@asynccontextmanager
async def hung(server):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(redis, "CALL_TIMEOUT_S", CALL_TIMEOUT_S)
        server.hang()
        yield "does not answer in time"
        server.wake()


@asynccontextmanager
async def full(server):
    """Refuse writes, but not reads."""
    async with Redis.from_url(server.url) as admin:
        await admin.config_set("maxmemory", "1")
        yield "is full"
        await admin.config_set("maxmemory", "0")


@asynccontextmanager
async def with_another_password(server):
    async with Redis.from_url(server.url) as admin:
        await admin.config_set("requirepass", "changed")
        await admin.client_kill_filter(_type="normal", skipme=True)
        yield "refused the password"
        await admin.config_set("requirepass", "")


@asynccontextmanager
async def without_a_command(server):
    async with Redis.from_url(server.url) as admin:
        await admin.execute_command("ACL", "SETUSER", "default", "-hset")
        yield "does not allow this user enough"
        await admin.execute_command("ACL", "SETUSER", "default", "+hset")


@pytest.mark.parametrize("failure", [dead, hung, full, with_another_password, without_a_command])
async def test_calls_neither_raise_nor_wait_while_the_store_is_unreachable(
    own_redis, stores, failure, caplog
):
    caplog.set_level(logging.INFO, "baton")  # other tests' imports leave the root at ERROR
    one, other = stores
    assert await use(one) == WELL
    async with failure(own_redis) as text:
        began = time.monotonic()
        await asyncio.gather(*(one.lead("me", LEASE_S) for _ in range(20)))
        assert time.monotonic() - began < 10 * CALL_TIMEOUT_S  # one timeout for all
        assert text in one.problem
        looks = asyncio.create_task(one.tend())
        await asyncio.sleep(0)
        began = time.monotonic()
        for _ in range(20):
            assert await use(one) == NOTHING
        assert await one.drain("during")
        assert time.monotonic() - began < 10 * CALL_TIMEOUT_S
        await looks
        for store in stores:
            await store.tend()
            assert text in store.problem
        assert one.drained == {"d", "during"}
    await recovered(stores)
    assert other.drained == {"d", "during"}
    await until(lambda: one.lead("me", LEASE_S))
    assert (await use(one))[1:] == WELL[1:]
    said = [record.getMessage() for record in caplog.records if own_redis.url[8:-2] in record.getMessage()]
    assert [one.startswith(AWAY) for one in said] == [True, True, False, False]
    assert all(one.endswith("is back") for one in said[2:])


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("redis://:wr0ng@127.0.0.1:{port}/0", "redis at 127.0.0.1:{port} refused the password"),
        ("redis://127.0.0.1:{port}/0", "refused the password"),
        ("redis://:s3cret@127.0.0.1:{port}/99", "DB index"),
    ],
    ids=["wrong password", "no password", "no such database"],
)
async def test_it_does_not_open_if_waiting_cannot_help(redis_server, url, text):
    port = redis_server.port
    said = await refused(url.format(port=port), f"(?i){text.format(port=port)}")
    assert not any(secret in said for secret in ("wr0ng", "s3cret"))


@pytest.mark.parametrize(("number", "refuses"), [(socket.EAI_NONAME, True), (socket.EAI_AGAIN, False)])
async def test_only_a_temporary_dns_failure_is_an_outage(monkeypatch, number, *, refuses):
    def fail(*_, **__):
        raise socket.gaierror(number, "it is not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    url = "redis://a-host:6379/0"
    if refuses:
        await refused(url, r"a-host:6379 does not answer .*not known")
    else:
        store = open_store(url, "t")
        await store.open()
        assert "not known" in store.problem
        await store.close()


# -- addresses and passwords


@pytest.mark.parametrize(
    "url",
    [
        *("postgres://:s3cret@host", "redis://host:port/0", "nowhere", ":s3cret@host:6379"),
        *("redis:/:s3cret@h", "redis://:s3cret/x@host:6379/0", "redis://:s3cret:6379/0"),
        *("redis://:[s3cret@host", "redis://[s3cret"),
    ],
)
async def test_invalid_urls_are_refused(url):
    assert "s3cret" not in await refused(url, r"scheduler\.store")


async def test_a_password_quoted_by_the_server_is_hidden(tmp_path):
    """A server without HELLO and AUTH quotes their arguments."""
    without = (("--rename-command", name, "") for name in ("AUTH", "HELLO"))
    with RedisServer(tmp_path, extra=tuple(word for words in without for word in words)) as server:
        store = RedisStore(f"redis://:s3cret@127.0.0.1:{server.port}/0", "t")
        with pytest.raises(StoreUnavailable, match="with args beginning with") as caught:
            await store.check()
        await store.close()
    assert "s3cret" not in str(caught.value)


async def test_a_separate_password(redis_server):
    store = RedisStore(f"redis://127.0.0.1:{redis_server.port}/0", "t", redis_server.password)
    await store.check()
    await store.close()
