"""The store in Redis during failovers, with Sentinels, and with a Redis Cluster."""

import asyncio

import pytest

from baton.scheduler.store import open_store
from baton.scheduler.store.redis import topic_keys
from harness.chaos.proxy import Proxy
from harness.redis_groups import MASTER, admin, cluster, follow, owner, promote, sentinels, servers
from tests.scheduler.conftest import opened, recovered, refused

KEY = topic_keys("t")[0]


async def shared(stores, *names):
    """Drain the last name at the first store; return whether the last store knows all names."""
    await stores[0].drain(names[-1])
    await stores[-1].tend()
    return stores[-1].drained >= set(names)


def keys_on(server):
    with admin(server) as client:
        return int(client.dbsize())


async def test_schedulers_leave_a_demoted_master_although_it_keeps_connections_open(tmp_path):
    with servers(tmp_path, 2) as (one, other):
        follow(other, one)
        forwarder = Proxy(target=one.port)
        await forwarder.start()
        url = f"redis://127.0.0.1:{forwarder.port}/0"
        try:
            async with opened(url) as stores:
                assert await shared(stores, "before")
                forwarder.target = other.port  # new connections go there
                await asyncio.to_thread(promote, other, one)
                await asyncio.to_thread(follow, one, other)
                assert not await shared(stores, "during")
                assert all("is a replica" in store.problem for store in stores)
                await recovered(stores)
                assert await shared(stores, "before", "during", "after")
        finally:
            await forwarder.close()


@pytest.mark.parametrize("setting", [("min-replicas-to-write", "1", "0"), ("maxmemory", "1", "0")])
async def test_an_error_closes_the_connection(own_redis, setting):
    """After any error, the next call may have to use another server."""
    name, wrong, right = setting
    async with opened(own_redis.url, 1) as (store,):
        with admin(own_redis) as client:
            before = {one["id"] for one in client.client_list()}
            client.config_set(name, wrong)
            await store.tend()
            assert store.problem
            client.config_set(name, right)
            await recovered([store])
            mine = client.client_id()
            after = {one["id"] for one in client.client_list()}
        assert after & before == {str(mine)}


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    with cluster(tmp_path_factory.mktemp("cluster")) as nodes:
        yield nodes


async def test_any_node_of_a_cluster_may_be_named(three):
    for node in three:
        async with opened(f"redis+cluster://127.0.0.1:{node.port}") as stores:
            assert await shared(stores, f"at-{node.port}")
    assert keys_on(owner(three, KEY)) > 0


async def test_a_named_node_may_be_away(three):
    url = f"redis+cluster://127.0.0.1:1,127.0.0.1:{three[0].port}"
    async with opened(url) as stores:
        assert await shared(stores, "one-is-away")


async def test_a_plain_url_of_the_wrong_cluster_node_is_refused(three):
    right = owner(three, KEY)
    for node in three:
        if node is right:
            async with opened(node.url):
                pass
        else:
            await refused(node.url, r"Redis Cluster.*redis\+cluster://HOST:PORT.*scheduler\.store")


async def test_a_moved_slot_is_found(three):
    """Nodes learn of the new owner as with `redis-cli --cluster reshard`. The drains are written again."""
    async with opened(f"redis+cluster://127.0.0.1:{three[0].port}") as stores:
        assert await shared(stores, "before-the-move")
        was = owner(three, KEY)
        to = next(node for node in three if node is not was)
        with admin(to) as target:
            name = target.cluster("MYID").decode()
            slot = target.cluster("KEYSLOT", KEY)
        with admin(was) as source:
            source.flushall()  # a slot with keys cannot be moved
        for node in (to, was, *three):
            with admin(node) as client:
                client.cluster("SETSLOT", slot, "NODE", name)
        await recovered(stores)
        assert await shared(stores, "before-the-move", "after-it")
        assert keys_on(to) > 0


async def test_failover_in_a_cluster(tmp_path):
    with cluster(tmp_path, replicas=1) as nodes:
        async with opened(f"redis+cluster://127.0.0.1:{nodes[0].port}") as stores:
            assert await shared(stores, "before")
            dead = owner(nodes, KEY)
            dead.stop()
            assert not await shared(stores, "during")
            assert stores[0].problem
            await recovered(stores, 20)
            assert await shared(stores, "before", "during", "after")
            alive = [node for node in nodes if node is not dead]
            assert keys_on(owner(alive, KEY)) > 0


async def test_a_server_without_cluster_mode_is_refused(own_redis):
    url = f"redis+cluster://127.0.0.1:{own_redis.port}"
    await refused(url, r"no cluster mode: write redis://HOST:PORT/DB into scheduler\.store")


async def test_failover_with_sentinels(tmp_path):
    """Servers and Sentinels have passwords; one Sentinel dies with the master."""
    with servers(tmp_path, 2, password="s3cret") as (one, other):
        follow(other, one)
        with sentinels(tmp_path, one, 3, password="sent1nel") as ports:
            hosts = ",".join(f"127.0.0.1:{port}" for port in (1, *ports))
            url = f"redis+sentinel://:s3cret@{hosts}/{MASTER}?sentinel_password=sent1nel"
            async with opened(url) as stores:
                assert await shared(stores, "before")
                one.stop()
                assert not await shared(stores, "during")
                assert stores[0].problem
                await recovered(stores, 20)
                assert await shared(stores, "before", "during", "after")
                assert keys_on(other) > 0
            store = open_store(f"redis+sentinel://:s3cret@{hosts}/nobody?sentinel_password=sent1nel", "t")
            await store.open()
            assert "names a master 'nobody'" in store.problem
            assert "sent1nel" not in store.problem
            await store.close()


async def test_a_plain_url_of_a_sentinel_is_refused(own_redis, tmp_path):
    with sentinels(tmp_path, own_redis, 1, replicas=0) as (port,):
        text = r"a Sentinel.*write redis\+sentinel://HOST:PORT/MASTER into"
        await refused(f"redis://127.0.0.1:{port}", text)
