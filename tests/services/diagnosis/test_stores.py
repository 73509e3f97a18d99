import asyncio

import pytest

from baton.scheduler.store.redis import topic_keys
from baton.services.config import load
from baton.services.diagnosis import stores
from baton.services.diagnosis.finding import Verdict
from harness.redis_groups import MASTER, cluster, follow, owner, sentinels, servers
from harness.scheduling import RedisServer
from harness.support import free_port
from tests.security.test_redis import PASSWORD, RULES, TOPIC


@pytest.fixture
def start(tmp_path):
    running = []

    def one(password="", *extra):
        server = RedisServer(tmp_path, password=password, extra=extra)
        server.start()
        running.append(server)
        return server

    yield one
    for server in running:
        server.stop()


def found(store, **router):
    async def all_of_it():
        settings = load({"scheduler": {"store": store, "topic": TOPIC}, "router": router})
        return [one async for one in stores.findings(settings)]

    return asyncio.run(all_of_it())


def test_a_redis_that_is_well(start):
    server = start(PASSWORD, "--maxmemory-policy", "noeviction", "--maxmemory", "100mb")
    one, policy, scripts, keys, _, book = found(server.url, keys_store=server.url)
    assert {one.verdict, policy.verdict, scripts.verdict, keys.verdict} == {Verdict.OK}
    assert "version 7" in one.what or "version 8" in one.what
    assert " ms a call" in one.what
    assert policy.what == "maxmemory-policy noeviction, maxmemory 104857600"
    assert scripts.what == "the user may run the scheduler's scripts"
    assert "holds no keys" in book.what
    assert book.verdict is Verdict.WRONG
    assert not any(PASSWORD in str(one) for one in found(server.url, keys_store=server.url))


def test_the_password_of_the_keys_may_be_in_a_file(start, tmp_path):
    server = start(PASSWORD)
    (tmp_path / "password").write_text(PASSWORD)
    (tmp_path / "password").chmod(0o600)
    plain = f"redis://127.0.0.1:{server.port}/0"
    keys, _, book = found("memory", keys_store=f"{plain}?password_file={tmp_path / 'password'}")
    assert keys.verdict is Verdict.OK
    assert "holds no keys" in book.what


def test_a_store_that_evicts_keys_is_a_problem(start):
    server = start("", "--maxmemory-policy", "allkeys-lru", "--maxmemory", "100mb")
    policy = found(server.url)[1]
    assert policy.verdict is Verdict.WRONG
    assert "noeviction" in policy.todo


def test_a_store_that_is_unreachable_or_refuses_is_a_problem(start):
    (one,) = found(f"redis://127.0.0.1:{free_port()}/0")
    assert one.verdict is Verdict.WRONG
    server = start("another")
    (one,) = found(f"redis://:{PASSWORD}@127.0.0.1:{server.port}/0")
    assert one.verdict is Verdict.WRONG
    assert PASSWORD not in str(one)


@pytest.mark.parametrize("enough", [True, False])
def test_the_rights_of_its_user(start, tmp_path, enough):
    """The rights in docs/security.md are enough; if one of them is missing, the doctor says so."""
    acl = RULES if enough else RULES.replace("+hgetall ", "")
    (tmp_path / "users.acl").write_text(f"user default off\n{acl}\n")
    server = start("", "--aclfile", str(tmp_path / "users.acl"))
    *_, policy, scripts = found(f"redis://baton:{PASSWORD}@127.0.0.1:{server.port}/0")
    assert "it must be noeviction" in policy.what
    assert scripts.verdict is (Verdict.OK if enough else Verdict.WRONG)
    if not enough:
        assert "docs/security.md" in scripts.what


def test_a_replica_a_sentinel_and_a_cluster_s_wrong_node_are_named_with_the_cure(tmp_path):
    with servers(tmp_path / "pair", 2) as (master, replica):
        follow(replica, master)
        *_, last = found(replica.url)
        assert last.verdict is Verdict.WRONG
        assert "is a replica" in last.what
        with sentinels(tmp_path, master, 1) as (port,):
            (one,) = found(f"redis://127.0.0.1:{port}")
            assert one.verdict is Verdict.WRONG
            assert "redis+sentinel://HOST:PORT/MASTER into scheduler.store" in one.todo
            well, *_, scripts = found(f"redis+sentinel://127.0.0.1:{port}/{MASTER}")
            assert {well.verdict, scripts.verdict} == {Verdict.OK}
    with cluster(tmp_path / "cluster") as nodes:
        right = owner(nodes, topic_keys(TOPIC)[0])
        wrong = next(node for node in nodes if node is not right)
        *_, last = found(wrong.url)
        assert last.verdict is Verdict.WRONG
        assert "redis+cluster://HOST:PORT" in f"{last.what} {last.todo}"
        well, *_, scripts = found(f"redis+cluster://127.0.0.1:{wrong.port}")
        assert {well.verdict, scripts.verdict} == {Verdict.OK}
        assert "mode cluster" in well.what
