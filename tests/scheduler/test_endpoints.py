"""The choice among several schedulers, of which real ones stand still, and lose Redis."""

from __future__ import annotations

import asyncio
import random
import signal
import sys
from asyncio.subprocess import Process
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.rpc import aio_channel
from baton.scheduler.client import SchedulerClient
from baton.scheduler.endpoints import CHECK_S, REST_CHECKS, Endpoint, owner
from baton.scheduler.errors import SchedulerUnavailable
from baton.scheduler.service import SchedulerServer
from baton.security.names import Role
from harness.scheduling import Options, RedisServer, until
from harness.support import PATIENCE, free_port

PROCESS, SERVICE = "", "baton.scheduler.v1.Scheduler"
PROGRAM = """
import asyncio, sys
from baton.scheduler.service import serve
from baton.services.config import SchedulerSettings
settings = SchedulerSettings(address=sys.argv[1])
asyncio.run(serve(settings, on_started=lambda address: print(address, flush=True)))
"""


class Elsewhere:
    """A scheduler in a process of its own, which can be made to stand still."""

    def __init__(self, process: Process, address: str) -> None:
        self.process = process
        self.address = address

    def stand_still(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)


@pytest.fixture
async def elsewhere() -> AsyncIterator[Elsewhere]:
    arguments = ("-c", PROGRAM, "127.0.0.1:0")
    process = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdout=asyncio.subprocess.PIPE)
    assert process.stdout
    async with asyncio.timeout(60 * PATIENCE):
        address = (await process.stdout.readline()).decode().strip()
    yield Elsewhere(process, address)
    if process.returncode is None:
        process.kill()
    await process.wait()


@pytest.fixture
async def router(elsewhere: Elsewhere) -> AsyncIterator[SchedulerClient]:
    async with SchedulerClient(elsewhere.address, router_id="router") as made:
        await made.refresh()
        yield made


async def test_one_missed_snapshot_is_no_death(elsewhere: Elsewhere, router: SchedulerClient) -> None:
    elsewhere.stand_still()
    with pytest.raises(SchedulerUnavailable):
        await router.refresh()
    elsewhere.go_on()
    assert router.answering
    await asyncio.gather(*(router.describe() for _ in range(3)))
    for _ in range(2):  # missed ones count in a row alone
        elsewhere.stand_still()
        with pytest.raises(SchedulerUnavailable):
            await router.refresh()
        elsewhere.go_on()
        await router.describe()
        assert router.answering


async def test_calls_that_wait_side_by_side_miss_one_answer(
    elsewhere: Elsewhere, router: SchedulerClient
) -> None:
    elsewhere.stand_still()
    missed = await asyncio.gather(*(router.refresh() for _ in range(20)), return_exceptions=True)
    elsewhere.go_on()
    assert {type(one) for one in missed} == {SchedulerUnavailable}
    assert router.answering


async def test_one_that_hangs_is_found_dead_without_another_call(
    elsewhere: Elsewhere, router: SchedulerClient
) -> None:
    elsewhere.stand_still()
    with pytest.raises(SchedulerUnavailable):
        await router.refresh()

    async def dead() -> bool:
        return not router.answering

    await until(dead)
    elsewhere.go_on()
    await router.describe()
    assert router.answering


async def test_one_that_is_gone_is_dead_at_once(elsewhere: Elsewhere, router: SchedulerClient) -> None:
    elsewhere.process.kill()
    await elsewhere.process.wait()
    with pytest.raises(SchedulerUnavailable):
        await router.refresh()
    assert not router.answering


async def health(address: str, service: str) -> str:
    async with aio_channel(address, Role.SCHEDULER) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        reply = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=5)
        return health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)


NAMES = [f"request-{number}" for number in range(40)]


def homes(client: SchedulerClient) -> set[str]:
    """Return the schedulers that requests go to; looking is what makes a client check them."""
    return {client.home(name) for name in NAMES}


async def all_at(client: SchedulerClient, *wanted: str) -> None:
    async def there() -> bool:
        return homes(client) == set(wanted)

    await until(there, 15)


@pytest.fixture
def watchful(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have schedulers look for their stores at once."""
    monkeypatch.setattr("baton.scheduler.service.WATCH_S", 0.02)


@pytest.mark.usefixtures("watchful")
async def test_the_requests_of_one_without_its_store_go_to_one_with(
    own_redis: RedisServer, redis_server: RedisServer, topic: str
) -> None:
    first = Options(f"127.0.0.1:{free_port()}", own_redis.url, topic)
    second = Options(f"127.0.0.1:{free_port()}", redis_server.url, topic)
    async with (
        SchedulerServer(first),
        SchedulerServer(second) as other,
        SchedulerClient(f"{first.address},{second.address}", router_id="router") as client,
    ):
        assert homes(client) == {first.address, second.address}
        own_redis.stop()

        async def says_so() -> bool:
            return await health(first.address, SERVICE) == "NOT_SERVING"

        await until(says_so)
        assert await health(first.address, PROCESS) == "SERVING"  # nobody shall restart it
        await all_at(client, second.address)
        assert client.home("") == second.address  # operators' calls, too
        assert (await client.describe()).store == other.store_name
        own_redis.start()
        await all_at(client, first.address, second.address)


@pytest.mark.usefixtures("watchful")
async def test_where_all_lost_their_store_the_first_gets_all(own_redis: RedisServer, topic: str) -> None:
    first = Options(f"127.0.0.1:{free_port()}", own_redis.url, topic)
    second = Options(f"127.0.0.1:{free_port()}", own_redis.url, topic)
    async with (
        SchedulerServer(first),
        SchedulerServer(second),
        SchedulerClient(f"{first.address},{second.address}", router_id="router") as client,
    ):
        own_redis.stop()
        await all_at(client, first.address)
        loop = asyncio.get_running_loop()
        began = loop.time()

        async def long_after() -> bool:
            """Ask all the while, until every check that could move a request was made."""
            assert homes(client) == {first.address}
            return loop.time() - began > (REST_CHECKS + 1) * CHECK_S

        await until(long_after, 30)


@pytest.mark.usefixtures("watchful")
async def test_who_is_back_with_its_store_first_is_not_run_to_at_once(
    own_redis: RedisServer, tmp_path: Path, topic: str
) -> None:
    """Bookings of the time without it are known to the one that was asked, which has it back soon."""
    others_redis = RedisServer(tmp_path)
    others_redis.start()
    first = Options(f"127.0.0.1:{free_port()}", own_redis.url, topic)
    second = Options(f"127.0.0.1:{free_port()}", others_redis.url, topic)
    async with (
        SchedulerServer(first),
        SchedulerServer(second),
        SchedulerClient(f"{first.address},{second.address}", router_id="router") as client,
    ):
        loop = asyncio.get_running_loop()

        async def serves(address: str) -> bool:
            return await health(address, SERVICE) == "SERVING"

        own_redis.stop()
        others_redis.stop()
        await all_at(client, first.address)
        assert not await serves(first.address)
        others_redis.start()
        await until(lambda: serves(second.address))
        until_s = loop.time() + 1.1 * CHECK_S  # a check has told that the second one serves
        while loop.time() < until_s:
            assert homes(client) == {first.address}
            await asyncio.sleep(0.01)
        own_redis.start()
        await all_at(client, first.address, second.address)
    others_redis.stop()


async def test_keys_spread_evenly_and_only_those_of_one_that_is_gone_move() -> None:
    draw = random.Random(1)
    for count in (2, 3, 5, 8):
        endpoints = [Endpoint(f"10.0.0.{number}:7400") for number in range(count)]
        keys = [f"{draw.getrandbits(64):x}" for _ in range(4_000)]
        before = {key: owner(endpoints, key) for key in keys}
        shares = Counter(one.address for one in before.values())
        mean = len(keys) / count
        assert all(abs(shares[one.address] - mean) < 5 * mean**0.5 for one in endpoints)
        gone = draw.choice(endpoints)
        left = [one for one in endpoints if one is not gone]
        draw.shuffle(left)  # a list in another order is the same list
        moved = {key: owner(left, key) for key in keys if owner(left, key) is not before[key]}
        assert all(before[key] is gone for key in moved)
        assert len(moved) == shares[gone.address]
        taken = Counter(one.address for one in moved.values())
        assert all(taken[one.address] > len(moved) / len(left) / 2 for one in left)
        for one in endpoints:
            await one.close()


async def test_the_requests_of_one_that_hangs_move_and_come_back(elsewhere: Elsewhere) -> None:
    async with (
        SchedulerServer(Options()) as server,
        SchedulerClient(f"{elsewhere.address},{server.address}", router_id="router") as client,
    ):
        assert homes(client) == {elsewhere.address, server.address}
        mine = {name for name in NAMES if client.home(name) == server.address}
        elsewhere.stand_still()
        await all_at(client, server.address)
        elsewhere.go_on()
        await all_at(client, elsewhere.address, server.address)
        assert {name for name in NAMES if client.home(name) == server.address} == mine
