"""Shared limits and keys while another Redis becomes the master."""

import asyncio

import pytest

from baton.services.tenants import shared
from baton.services.tenants.model import ApiKey, BookError, Caller, Limits, Tenant, digest
from baton.services.tenants.quotas import Quotas
from baton.services.tenants.redis_book import RedisBook
from harness.chaos.proxy import Proxy
from harness.redis_groups import admin, cluster, follow, promote, servers
from harness.scheduling import until

WHO = Caller("k", "acme", Limits(), Tenant(concurrency=50, requests_per_s=1_000))


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(shared, "PROBE_S", 0.05)


def with_key(name, secret):
    return lambda held: held.with_key(name, ApiKey(tenant="t", sha256=digest(secret).hex()))


async def edited(book, edit):
    """Return whether the book takes an edit."""
    try:
        await book.edit(edit)
    except BookError:
        return False
    return True


async def test_limits_and_keys_follow_to_the_new_master_though_their_connections_stay(
    tmp_path, quick, caplog, topic, share
):
    caplog.set_level("INFO")
    with servers(tmp_path, 2) as (one, other):
        follow(other, one)
        forwarder = Proxy(target=one.port)
        await forwarder.start()
        url = f"redis://127.0.0.1:{forwarder.port}/0"
        store, book = await share(url), RedisBook(url, topic, for_router=True)
        quotas = Quotas(store, "r1")
        try:
            await book.edit(with_key("k", b"one"))
            assert await book.changed()
            await asyncio.gather(*(quotas.enter(WHO) for _ in range(20)))  # opens many connections
            forwarder.target = other.port  # new connections go there
            await asyncio.to_thread(promote, other, one)
            await asyncio.to_thread(follow, one, other)
            (await quotas.enter(WHO)).leave()  # the request does not fail
            assert not store.up
            with pytest.raises(BookError, match="is a replica"):  # it still answers reads
                await book.changed()
            await until(lambda: store.up)
            for _ in range(30):  # each of its connections
                (await quotas.enter(WHO)).leave()
                assert store.up
            await until(lambda: edited(book, with_key("l", b"two")))
            assert (held := await book.changed())
            assert set(held.keys) == {"k", "l"}
            with admin(other) as client:
                assert client.info("commandstats")["cmdstat_hset"]["calls"] > 0
            told = [one.levelname for one in caplog.records if one.name == shared.log.name]
            assert told == ["ERROR", "INFO"]
        finally:
            await book.close()
            await forwarder.close()


async def test_limits_are_unavailable_while_the_master_is_a_replica(own_redis, tmp_path, quick, share):
    """A replica answers PING and reads, so only a write reveals it."""
    with servers(tmp_path, 1) as (master,):
        store = await share(own_redis.url)
        quotas = Quotas(store, "r1")
        (await quotas.enter(WHO)).leave()
        await asyncio.to_thread(follow, own_redis, master)
        (await quotas.enter(WHO)).leave()
        for _ in range(20):
            await asyncio.sleep(0.02)
            assert not store.up


async def test_limits_and_keys_in_a_cluster(tmp_path, topic, share):
    with cluster(tmp_path) as nodes:
        for node in nodes:
            url = f"redis+cluster://127.0.0.1:{node.port}"
            store, book = await share(url), RedisBook(url, topic, for_router=True)
            try:
                await book.edit(with_key(f"k{node.port}", str(node.port).encode()))
                assert (held := await book.changed())
                assert f"k{node.port}" in held.keys
                (await Quotas(store, "r1").enter(WHO)).leave()
                assert store.up
            finally:
                await book.close()
