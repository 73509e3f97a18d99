"""A scheduler with Redis over TLS, whose user has the rules in docs/security.md, or fewer."""

import asyncio
import uuid

import pytest
from redis.asyncio import Redis

from baton.attempts import Attempt
from baton.protos import scheduler_pb2 as pb
from baton.scheduler.client import SchedulerClient
from baton.scheduler.errors import StoreRefuses
from baton.scheduler.service import SchedulerServer
from baton.scheduler.store.redis import RedisStore
from harness.scheduling import Options, identity, place, until_told
from tests.security.acl import ADMIN, PASSWORD, GuardedRedis, rules

TOPIC = f"acl-{uuid.uuid4().hex[:8]}"
RULES = rules("baton", TOPIC)
# HELLO is optional, and SELECT is needed only for a database other than 0.
RIGHTS = [one for one in RULES.split() if one.startswith("+") and one not in ("+hello", "+select")]


@pytest.fixture(scope="module")
def redis(tmp_path_factory):
    """Run a Redis with the page's user, and for each right a user of that name who lacks it."""
    others = [
        " ".join(["user", lacks[1:], *(one for one in RULES.split()[2:] if one != lacks)]) for lacks in RIGHTS
    ]
    with GuardedRedis(tmp_path_factory.mktemp("redis"), RULES, ADMIN, *others) as made:
        yield made


async def test_the_rules_on_the_page_are_sufficient(redis):
    options = Options(store=redis.url("baton"), topic=TOPIC)
    async with SchedulerServer(options) as server, SchedulerClient(server.address, router_id="r") as client:
        await client.register(identity("w1"), pb.WORKER_STATE_READY)
        assert (await client.heartbeat("w1", pb.WORKER_STATE_READY, pb.WorkerLoad(), 0)).known
        await place(client, "q", 1, 10, 5)
        await client.refresh()
        client.reports.finished(Attempt("q", 1), "stop", pb.Cost())
        await until_told(client, lambda told: not told.attempts)
        assert (await client.drain("w1")).worker_id == "w1"
        assert (await client.undrain("w1")).name == "w1"
        await client.deregister("w1", 9)
        description = await client.describe()
        assert not description.store_problem
        assert len(description.handoffs) == 1
        assert await server.store.lead("me", 1)


async def used(url, topic=TOPIC):
    """Call every method of a store; return its problem, or the error with which it refuses to open."""
    store = RedisStore(url, topic)
    try:
        await store.open()
    except StoreRefuses as error:
        await store.close()
        return error
    await store.drain("w1")
    await store.tell("router", "r1", b"busy", 0.001)
    await store.tell("fleet", "f1", b"two places", 5)
    await asyncio.sleep(0.002)
    assert (await store.told()).fleets == ({} if store.problem else {"f1": b"two places"})
    fence = await store.lead("me", 5)
    await store.order(fence, {"f1": b"one worker"})
    orders = await store.tell("fleet", "f1", b"two places", 5)
    assert bool(store.problem) is (orders != b"one worker")
    await store.close()
    return store.problem


async def test_every_permission_is_needed(redis):
    assert await used(redis.url("baton")) == ""
    refused = []
    for user, topic in [*((right[1:], TOPIC) for right in RIGHTS), ("baton", "another-topic")]:
        async with Redis.from_url(redis.url("admin", "x")) as admin:
            await admin.script_flush()
        problem = await used(redis.url(user), topic)
        for part in ("does not allow this user enough", "docs/security.md"):
            assert part in str(problem), (user, topic)
        assert PASSWORD not in str(problem)
        refused += [user] if isinstance(problem, StoreRefuses) else []
    assert {"evalsha", "hset", "baton"} <= set(refused)
