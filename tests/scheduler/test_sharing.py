"""Several schedulers over one Redis: they share the requests, and what each decides stays fenced."""

from __future__ import annotations

import asyncio
import random
import signal
import sys
import uuid
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import pytest

from baton.attempts import Attempt
from baton.block_log import BlockLogs, Change
from baton.prefix_keys import key_of
from baton.protos import scheduler_pb2 as pb
from baton.scheduler.client import Placement, SchedulerClient
from baton.scheduler.errors import NoCapacity, SchedulerUnavailable
from baton.scheduler.service import SchedulerServer
from baton.scheduler.session import WorkerSession
from baton.scheduler.store.redis import RedisStore
from harness.scheduling import Options, RedisServer, capacity, free_port, identity, need, register, until
from harness.support import PATIENCE

P, D, M = pb.ROLE_PREFILL, pb.ROLE_DECODE, pb.ROLE_MIXED
PROGRAM = """
import asyncio, sys
from baton.scheduler.service import serve
from baton.services.config import SchedulerSettings
address, store, topic = sys.argv[1:]
settings = SchedulerSettings(address=address, store=store, topic=topic, worker_lease_s=60)
asyncio.run(serve(settings, on_started=lambda address: print(address, flush=True)))
"""


@dataclass
class Pair:
    """Two schedulers of this process over one Redis."""

    servers: list[SchedulerServer]
    address: str

    def placed(self) -> list[float]:
        """Return the number of placements that each was asked for."""
        name = "baton_scheduler_place_seconds_count"
        return [one.metrics.registry.get_sample_value(name) or 0.0 for one in self.servers]

    def named(self, client: SchedulerClient, number: int) -> str:
        """Return a request that belongs to one of them."""
        address = self.address.split(",")[number]
        return next(name for name in iter(lambda: uuid.uuid4().hex, "") if client.home(name) == address)


@asynccontextmanager
async def pair(store: str, topic: str) -> AsyncIterator[Pair]:
    options = [Options(f"127.0.0.1:{free_port()}", store, topic) for _ in range(2)]
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(SchedulerServer(one)) for one in options]
        for server in servers:
            server.members.introduce(pb.Process(id=server.address, kind="scheduler", metrics_address="h:1"))
        yield Pair(servers, ",".join(one.address for one in options))


@pytest.fixture
async def two(redis_server: RedisServer, topic: str) -> AsyncIterator[Pair]:
    async with pair(redis_server.url, topic) as made:
        yield made


@pytest.fixture
async def store(redis_server: RedisServer, topic: str) -> AsyncIterator[RedisStore]:
    """Open the store that the two schedulers share."""
    made = RedisStore(redis_server.url, topic)
    yield made
    await made.close()


async def place(client: SchedulerClient, request_id: str, epoch: int = 1, **more: Any) -> Placement:
    return await client.place(need(request_id, epoch, 20, 10, router_id=client.router_id, **more))


async def test_both_decide_and_nothing_is_overbooked(two: Pair, store: RedisStore) -> None:
    """Rounds of more requests than there is room for, by three routers, of which some end meanwhile."""
    draw = random.Random(1)
    for name, role in (("p1", P), ("p2", P), ("d1", D), ("d2", D), ("m", M)):
        await register(store, name, role)
    most = {"d1": 8, "d2": 8, "m": 8}
    async with AsyncExitStack() as stack:
        routers = [
            await stack.enter_async_context(SchedulerClient(two.address, router_id=f"router-{number}"))
            for number in range(3)
        ]
        running: list[tuple[SchedulerClient, Placement]] = []
        for _ in range(4):
            asking = [draw.choice(routers) for _ in range(60)]
            outcomes = await asyncio.gather(
                *(place(one, uuid.uuid4().hex) for one in asking), return_exceptions=True
            )
            for client, outcome in zip(asking, outcomes, strict=True):
                if isinstance(outcome, Placement):
                    running.append((client, outcome))
                else:
                    assert isinstance(outcome, NoCapacity)
                    assert outcome.code == pb.Rejection.CODE_FULL
            view = await store.view()
            for name, limit in most.items():
                booked = view.workers[name].reserved
                held = sum(name == one.decode.worker_id for _, one in running)
                assert booked.requests == held <= limit
                assert booked.blocks <= view.workers[name].capacity.num_blocks - 1
            assert len(running) == sum(most.values())  # and none stands empty
            draw.shuffle(running)
            ended, running = running[:10], running[10:]
            for client, one in ended:
                client.reporter.prefilled(one.attempt)
                client.reporter.finished(one.attempt, "stop")

            async def over(left: int = len(running)) -> bool:
                return (await store.view()).live_attempts == left

            await until(over)
    assert min(two.placed()) > 30


async def test_who_lost_the_store_decides_nothing_while_another_has_it(
    own_redis: RedisServer, redis_server: RedisServer, topic: str
) -> None:
    first = Options(f"127.0.0.1:{free_port()}", own_redis.url, topic)
    second = Options(f"127.0.0.1:{free_port()}", redis_server.url, topic)
    both = f"{first.address},{second.address}"
    async with (
        SchedulerServer(first) as cut_off,
        SchedulerServer(second) as serving,
        SchedulerClient(both, router_id="router") as client,
    ):
        for address in both.split(","):
            async with SchedulerClient(address) as worker:
                await worker.register(identity("m"), pb.WORKER_STATE_READY)
        name = next(name for name in iter(lambda: uuid.uuid4().hex, "") if client.home(name) == first.address)
        own_redis.stop()
        with pytest.raises(SchedulerUnavailable, match="lost its store"):
            await place(client, name)
        assert client.home(name) == second.address  # at once: no check had to tell
        placed = await place(client, name, 2)
        assert (placed.scheduler, placed.moved) == (second.address, True)
        assert (await cut_off._store.view()).live_attempts == 0
        assert (await serving._store.view()).live_attempts == 1


async def test_where_nobody_has_the_store_the_first_knows_what_the_second_booked(
    own_redis: RedisServer, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The room for eight is filled by both, and nobody gets a ninth when memory decides."""
    monkeypatch.setattr("baton.scheduler.service.WATCH_S", 60.0)  # memory follows nothing by itself
    async with pair(own_redis.url, topic) as two, SchedulerClient(two.address, router_id="router") as client:
        for server in two.servers:  # their memories know the worker
            async with SchedulerClient(server.address) as worker:
                await worker.register(identity("m"), pb.WORKER_STATE_READY)
        for number in range(8):
            await place(client, two.named(client, number % 2))
        own_redis.stop()
        name = two.named(client, 1)
        for epoch in (1, 2):  # each says that it has lost it
            with pytest.raises(SchedulerUnavailable):
                await place(client, name, epoch)
        epochs = iter(range(3, 100))

        async def refused_as_full() -> bool:
            """A report that is under way may come after the first question, and never after the next ones."""
            try:
                extra = await place(client, name, next(epochs))
            except NoCapacity as no:
                return no.code == pb.Rejection.CODE_FULL
            client.reporter.finished(extra.attempt, "stop")
            return False

        await until(refused_as_full)
        assert client.home(name) == two.servers[0].address


@pytest.fixture
async def paused_one(redis_server: RedisServer, topic: str) -> AsyncIterator[tuple[Process, str]]:
    arguments = ("-c", PROGRAM, f"127.0.0.1:{free_port()}", redis_server.url, topic)
    process = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdout=asyncio.subprocess.PIPE)
    assert process.stdout
    async with asyncio.timeout(60 * PATIENCE):
        address = (await process.stdout.readline()).decode().strip()
    yield process, address
    process.kill()
    await process.wait()


async def test_what_one_that_stood_still_decides_late_is_refused(
    paused_one: tuple[Process, str], redis_server: RedisServer, topic: str, store: RedisStore
) -> None:
    """It goes on while its callers still wait: their requests were placed elsewhere meanwhile."""
    process, address = paused_one
    options = Options(f"127.0.0.1:{free_port()}", redis_server.url, topic)
    await register(store, "m", M)
    async with (
        SchedulerServer(options),
        SchedulerClient(address, router_id="router") as late,
        SchedulerClient(f"{address},{options.address}", router_id="router") as client,
    ):
        await late.describe()
        process.send_signal(signal.SIGSTOP)
        asked = [asyncio.create_task(place(late, f"r{number}")) for number in range(4)]
        for number in range(4):
            for epoch in (2, 3, 4):  # as a router does; the first may be asked of the one that stands still
                with suppress(SchedulerUnavailable):
                    placed = await place(client, f"r{number}", epoch)
                    break
            assert placed.scheduler == options.address
        process.send_signal(signal.SIGCONT)
        for one in await asyncio.gather(*asked, return_exceptions=True):
            # Too late for its caller's patience, for the store, or for the room that was left to it.
            assert isinstance(one, SchedulerUnavailable) or (
                isinstance(one, NoCapacity)
                and one.code in {pb.Rejection.CODE_STALE_EPOCH, pb.Rejection.CODE_FULL}
            )
        view = await store.view()
        assert (view.live_attempts, view.workers["m"].reserved.requests) == (4, 4)


async def test_one_goes_and_comes_back_while_requests_run(redis_server: RedisServer, topic: str) -> None:
    first = Options(f"127.0.0.1:{free_port()}", redis_server.url, topic)
    second = Options(f"127.0.0.1:{free_port()}", redis_server.url, topic)
    both = f"{first.address},{second.address}"
    async with SchedulerServer(second), SchedulerClient(both, router_id="router") as client:
        session = WorkerSession(client, identity("m"), pb.WorkerLoad)
        async with SchedulerServer(first):
            await session.start(2)
            await session.ready(capacity())
            name = next(
                name for name in iter(lambda: uuid.uuid4().hex, "") if client.home(name) == first.address
            )
            running = await place(client, name)
            assert running.scheduler == first.address
        with suppress(SchedulerUnavailable):  # nobody is there: the next one is asked
            await place(client, f"{name}-", 1)
        again = await place(client, f"{name}-", 2)
        assert again.scheduler == second.address
        assert {one.attempt.request_id for one in (await client.describe()).attempts} >= {name, f"{name}-"}
        client.reporter.finished(running.attempt, "stop")  # to whoever is there

        async def over() -> bool:
            return name not in {one.attempt.request_id for one in (await client.describe()).attempts}

        await until(over)
        async with SchedulerServer(first):

            async def at_the_first_again() -> bool:
                return client.home(name) == first.address

            await until(at_the_first_again, 10)
            assert not (await place(client, f"{name}--")).moved
            await session.close()


async def test_the_eldest_of_all_routers_comes_first_whoever_is_asked(two: Pair, store: RedisStore) -> None:
    await register(store, "m", M)
    async with (
        SchedulerClient(two.address, router_id="mine") as mine,
        SchedulerClient(two.address, router_id="other") as other,
    ):
        running = [await place(mine, two.named(mine, number % 2)) for number in range(8)]
        theirs, ours = two.named(other, 0), two.named(mine, 1)
        epochs = iter(range(1, 1_000))

        async def known() -> bool:
            """The elder goes on asking, and is refused; the other scheduler has heard of it."""
            with pytest.raises(NoCapacity):
                await place(other, theirs, next(epochs), waited_s=5.0)
            return bool(two.servers[1]._placer.turns._elsewhere)

        await until(known)
        mine.reporter.finished(running[0].attempt, "stop")

        async def room() -> bool:
            return (await store.view()).live_attempts == 7

        await until(room)
        with pytest.raises(NoCapacity, match="a request of router other goes first"):
            await place(mine, ours)
        await place(other, theirs, next(epochs), waited_s=5.0)
        mine.reporter.finished(running[1].attempt, "stop")
        await until(room)
        later = iter(range(2, 1_000))

        async def placed() -> bool:
            with suppress(NoCapacity):
                await place(mine, ours, next(later))
                return True
            return False

        await until(placed)


async def test_every_scheduler_hears_what_caches_hold(redis_server: RedisServer, topic: str) -> None:
    """Also one that is started again; the others' knowledge does not begin anew for it."""
    options = [
        Options(f"127.0.0.1:{free_port()}", redis_server.url, topic, heartbeat_s=0.05) for _ in range(2)
    ]
    draw = random.Random(1)
    keys = [key_of(draw.getrandbits(64), depth) for depth in range(1, 9_001)]  # more than two messages carry
    both = ",".join(one.address for one in options)
    async with SchedulerServer(options[0]) as home, SchedulerClient(both) as client:
        async with SchedulerServer(options[1]) as other:
            worker_id = next(
                name for name in iter(lambda: uuid.uuid4().hex, "") if client.home(name) == options[0].address
            )
            session = WorkerSession(client, identity(worker_id), pb.WorkerLoad)
            session.blocks = BlockLogs()
            session.blocks.take(Change(stored=keys))
            await session.start(5)
            await session.ready(capacity())

            async def known(server: SchedulerServer, blocks: int) -> bool:
                return len(server._prefixes.index) == blocks

            for server in (home, other):
                await until(lambda server=server: known(server, 9_000))
            session.blocks.take(Change(removed=keys[4_000:]))
            for server in (home, other):
                await until(lambda server=server: known(server, 4_000))
        session.blocks.take(Change(removed=keys[3_000:4_000]))
        async with SchedulerServer(options[1]) as other:
            await until(lambda: known(other, 3_000), 10)
            assert await known(home, 3_000)
            assert home._prefixes.begun == 1
            await session.close()


async def test_operators_hear_of_all_of_them(two: Pair, store: RedisStore) -> None:
    await register(store, "m", M)
    async with AsyncExitStack() as stack:
        operator = await stack.enter_async_context(SchedulerClient(two.address))
        routers = []
        for number in range(2):
            name = two.named(operator, number)
            client = await stack.enter_async_context(SchedulerClient(two.address, router_id=name))
            await client.refresh()
            await place(client, two.named(client, number))
            routers.append(client)
        told = await operator.describe()
        assert {one.router_id for one in told.routers} == {one.router_id for one in routers}
        assert [(one.address, one.placements) for one in told.schedulers] == [
            (address, 1) for address in two.address.split(",")
        ]
        said = await operator.set_log_level("routers", "debug")
        assert set(said.processes) == {one.router_id for one in routers}
        assert [await one.refresh() for one in routers] == ["debug", "debug"]
        assert "is no process here" in (await operator.set_log_level("nobody", "debug")).problem


async def test_a_goodbye_and_a_report_reach_the_store_by_any_of_them(two: Pair, store: RedisStore) -> None:
    await register(store, "m", M)
    async with SchedulerClient(two.address, router_id="router") as client:
        for number in range(2):
            placed = await place(client, two.named(client, number))
            client.reporter.prefilled(placed.attempt)
            client.reporter.finished(placed.attempt, "stop")

        async def released() -> bool:
            view = await store.view()
            return not view.live_attempts and view.workers["m"].reserved.empty

        await until(released)
        state = await store.export()
        over = {replace(one, lease_s=0.0).attempt: one.over for one in state.requests}
        assert set(over.values()) == {True}
        assert all(isinstance(one, Attempt) for one in over)
