"""Several schedulers over one Redis: each knows everything, and works without the others."""

import asyncio
import random
import signal
import uuid
from contextlib import AsyncExitStack, suppress

import pytest

from baton.block_log import BlockLogs, Change
from baton.prefix_keys import key_of
from baton.protos import scheduler_pb2 as pb
from baton.scheduler.client import Placement, SchedulerClient
from baton.scheduler.errors import NoCapacity, SchedulerUnavailable
from baton.scheduler.service import SchedulerServer
from baton.scheduler.worker_session import WorkerSession
from harness.scheduling import Options, capacity, free_port, held, identity, need, until, until_told, working
from harness.support import freeze
from tests.scheduler.conftest import Schedulers, scheduler_process

P, D, M = pb.ROLE_PREFILL, pb.ROLE_DECODE, pb.ROLE_MIXED


class Pair(Schedulers):
    """Two schedulers over one Redis, with workers and routers."""

    def __init__(self, store, topic):
        super().__init__(store=store, topic=topic)
        self.address = ",".join(self.addresses)
        self._stack = AsyncExitStack()

    async def begin(self, number):
        server = await super().begin(number)
        server.introduce(pb.Process(id=server.address, kind="scheduler", metrics_address="h:1"))
        return server

    async def close(self):
        await self._stack.aclose()
        await super().close()

    async def work(self, worker_id, role=M):
        client = await self._stack.enter_async_context(SchedulerClient(self.address))
        return await self._stack.enter_async_context(working(client, identity(worker_id, role)))

    async def route(self, number):
        """Start a router with this home scheduler."""
        async with SchedulerClient(self.address) as anybody:
            name = name_at(anybody, self.addresses[number])
        return await self._stack.enter_async_context(SchedulerClient(self.address, router_id=name))

    def booked(self, number):
        return {key: one.reserved for key, one in self.workers(number).items() if not one.reserved.empty}

    async def agree_with(self, *routers):
        """Wait until each scheduler has exactly these routers' bookings."""

        async def so():
            holding = held(known for router in routers for known in router.reports._held.values())
            return all(self.booked(number) == holding for number in self.servers)

        await until(so)


def name_at(client, address):
    """Return an id whose home is this scheduler."""
    return next(name for name in iter(lambda: uuid.uuid4().hex, "") if client.home(name) == address)


@pytest.fixture
async def two(redis_server, topic):
    made = Pair(redis_server.url, topic)
    try:
        await made.begin(0)
        await made.begin(1)
        yield made
    finally:
        await made.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("baton.scheduler.endpoints.CHECK_S", 0.2)
    monkeypatch.setattr("baton.scheduler.endpoints.BACK_S", 0.5)


async def place(client, request_id, epoch=1, **more):
    return await client.place(need(request_id, epoch, 20, 10, router_id=client.router_id, **more))


async def test_both_schedulers_reach_the_same_sums(two):
    """Routers of both schedulers place more requests than there is room for, and finish some."""
    draw = random.Random(1)
    for name, role in (("p1", P), ("p2", P), ("d1", D), ("d2", D), ("m", M)):
        await two.work(name, role)
    routers = [await two.route(number % 2) for number in range(3)]
    running = []
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
        assert len(running) >= 24  # all workers are in use
        await two.agree_with(*routers)
        draw.shuffle(running)
        ended, running = running[:10], running[10:]
        for client, one in ended:
            client.reports.prefilled(one.attempt)
            client.reports.finished(one.attempt, "stop")
        await two.agree_with(*routers)


async def test_the_other_scheduler_takes_over_with_all_bookings(two):
    """The dead one comes back empty, and gets the worker and all bookings before it is asked again."""
    await two.work("m")
    router = await two.route(0)
    running = [await place(router, f"r{number}") for number in range(6)]
    await two.agree_with(router)
    await two.end(0)
    epochs = iter(range(1, 100))

    async def moved(request_id):
        with suppress(SchedulerUnavailable):
            return await place(router, request_id, next(epochs))
        return None

    found = await moved("seventh") or await moved("seventh")
    assert found
    assert (found.scheduler, found.moved) == (two.addresses[1], True)
    await place(router, "eighth")
    with pytest.raises(NoCapacity, match="8 of 8 requests"):
        await place(router, "ninth")
    router.reports.finished(running[0].attempt, "stop")
    again = await two.begin(0)
    await two.agree_with(router)
    assert two.workers(0).keys() == {"m"}
    placed = {"seventh", "eighth", *(f"r{number}" for number in range(1, 6))}
    assert again._servicer.ledger.live.keys() == placed
    await until(lambda: router.home(router.router_id) == two.addresses[0], 10)
    assert not (await place(router, "tenth")).moved
    with pytest.raises(NoCapacity):
        await place(router, "eleventh")


async def test_late_placements_of_a_hanging_scheduler_are_superseded(redis_server, topic):
    """The requests were placed by the other scheduler before the callers gave up."""
    options = Options(f"127.0.0.1:{free_port()}", redis_server.url, topic)
    shared = {"store": redis_server.url, "topic": topic, "worker_lease_s": 60}
    async with (
        scheduler_process(**shared) as (process, address),
        SchedulerServer(options) as server,
        SchedulerClient(f"{address},{options.address}") as anybody,
        SchedulerClient(address, router_id="router") as late,
        working(anybody, identity("m")),
        SchedulerClient(anybody.address, router_id=name_at(anybody, address)) as client,
    ):
        await late.describe()
        freeze(process.pid)
        asked = [asyncio.create_task(place(late, f"r{number}")) for number in range(4)]
        for number in range(4):
            for epoch in (2, 3):  # the first one goes to the hanging scheduler
                with suppress(SchedulerUnavailable):
                    placed = await place(client, f"r{number}", epoch)
                    break
            assert placed.scheduler == options.address
        process.send_signal(signal.SIGCONT)
        for one in await asyncio.gather(*asked, return_exceptions=True):
            assert isinstance(one, Placement | SchedulerUnavailable) or (
                isinstance(one, NoCapacity) and one.code == pb.Rejection.CODE_STALE_EPOCH
            )
        holding = {known.attempt for known in client.reports._held.values()}
        assert len(holding) == 4

        def the_later_ones_alone(told):
            elsewhere = {(one.attempt.request_id, one.attempt.epoch) for one in told.attempts}
            return elsewhere == {(one.request_id, one.epoch) for one in holding}

        await until_told(late, the_later_ones_alone, 10)
        assert {one.booking.attempt for one in server._servicer.ledger.live.values()} == holding


async def test_the_oldest_request_goes_first_at_any_scheduler(two, monkeypatch):
    monkeypatch.setattr("baton.scheduler.placer.HEARD_S", 60.0)
    await two.work("m")
    other, mine = await two.route(0), await two.route(1)
    running = [await place(mine, uuid.uuid4().hex) for _ in range(8)]
    await two.agree_with(mine)
    epochs = iter(range(1, 1_000))

    async def known():
        """Ask again until the other scheduler knows that the older request waits."""
        with pytest.raises(NoCapacity):
            await place(other, "theirs", next(epochs), waited_s=5.0)
        return bool(two.servers[1]._servicer.placer.turns._elsewhere)

    await until(known)
    mine.reports.finished(running[0].attempt, "stop")
    await two.agree_with(mine)
    with pytest.raises(NoCapacity, match=f"a request of router {other.router_id} goes first"):
        await place(mine, "ours")
    await place(other, "theirs", next(epochs), waited_s=5.0)
    mine.reports.finished(running[1].attempt, "stop")
    await two.agree_with(mine, other)
    later = iter(range(2, 1_000))

    async def placed():
        with suppress(NoCapacity):
            await place(mine, "ours", next(later))
            return True
        return False

    await until(placed)


async def test_every_scheduler_gets_cache_reports(two):
    """A restarted scheduler gets everything again, and the others do not."""
    draw = random.Random(1)
    keys = [key_of(draw.getrandbits(64), depth) for depth in range(1, 9_001)]  # more than two messages

    def known(blocks):
        return all(len(one._servicer.prefixes.index) == blocks for one in two.servers.values())

    async with SchedulerClient(two.address) as client:
        session = WorkerSession(client, identity(name_at(client, two.addresses[0])), pb.WorkerLoad)
        session.blocks = BlockLogs()
        session.blocks.take(Change(stored=keys))
        await session.start(30)
        await session.ready(capacity())
        await until(lambda: known(9_000))
        session.blocks.take(Change(removed=keys[4_000:]))
        await until(lambda: known(4_000))
        await two.end(1)
        session.blocks.take(Change(removed=keys[3_000:4_000]))
        await two.begin(1)
        await until(lambda: known(3_000), 10)
        assert two.servers[0]._servicer.prefixes.begun == 1
        await session.close()


async def test_operators_see_all_schedulers(two):
    await two.work("m")
    routers = [await two.route(number) for number in range(2)]
    operator = routers[0]
    for router in routers:
        await router.refresh()
        await place(router, uuid.uuid4().hex)
    await two.agree_with(*routers)
    told = await operator.describe()
    assert {one.router_id for one in told.routers} == {one.router_id for one in routers}
    assert [(one.address, one.placements) for one in told.schedulers] == [(one, 1) for one in two.addresses]
    assert (len(told.workers), len(told.attempts)) == (1, 2)
    said = await operator.set_log_level("routers", "debug")
    assert set(said.processes) == {one.router_id for one in routers}
    assert [await one.refresh() for one in routers] == ["debug", "debug"]
    assert "is no process here" in (await operator.set_log_level("nobody", "debug")).problem


async def test_operators_get_the_description_with_most_workers(two):
    async with SchedulerClient(two.addresses[1]) as client:
        await client.register(identity("m"), pb.WORKER_STATE_READY)
    async with SchedulerClient(two.address) as operator:
        assert [one.identity.worker_id for one in (await operator.describe()).workers] == ["m"]
