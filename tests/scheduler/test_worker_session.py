"""A worker's session against real schedulers."""

import asyncio
import time

import pytest

from baton.protos import scheduler_pb2 as pb
from baton.scheduler.client import SchedulerClient
from baton.scheduler.errors import NoCapacity, Refused, SchedulerUnavailable
from baton.scheduler.service import SchedulerServer
from baton.scheduler.worker_session import WorkerSession
from harness.scheduling import Options, capacity, free_port, identity, place, until, until_told, working
from harness.support import PATIENCE
from tests.scheduler.conftest import Schedulers


def short(state):
    return pb.WorkerState.Name(state).removeprefix("WORKER_STATE_")


def loading():
    one = identity("m")
    one.ClearField("capacity")
    return one


async def drains(session):
    async with asyncio.timeout(20 * PATIENCE):
        await session.draining.wait()


@pytest.fixture
async def client():
    async with SchedulerServer(Options(heartbeat_s=0.05)) as server, SchedulerClient(server.address) as made:
        yield made


async def test_a_workers_life(client):
    loads = iter(range(1_000))
    session = WorkerSession(client, loading(), lambda: pb.WorkerLoad(running=next(loads)))
    await session.start(30)
    assert session.registered
    assert (await client.describe()).workers[0].state == pb.WORKER_STATE_STARTING
    with pytest.raises(NoCapacity, match="none is ready"):
        await place(client, "r", 1, 1, 1)
    await session.ready(capacity())
    await place(client, "r", 1, 1, 1)
    await until_told(client, lambda told: told.workers[0].load.running >= 2)
    assert (await client.drain("m")).worker_id == "m"
    await drains(session)
    await until_told(client, lambda told: told.workers[0].state == pb.WORKER_STATE_DRAINING)
    await session.close()
    assert not (await client.describe()).workers


async def test_a_restarted_worker_of_a_drained_name_waits_to_be_undrained(client):
    def life(number):
        one = identity(f"m.{number}")
        one.name = "m"
        return one

    async def asked():
        return [(short(one.state), one.drained) for one in (await client.describe()).workers]

    async with working(client, life(1)) as first:
        assert (await client.drain("m.1")).worker_id == "m.1"
        await drains(first)
    assert list((await client.describe()).drained) == ["m"]
    async with working(client, life(2)) as second:
        await until(lambda: bool(second.held))
        assert await asked() == [("DRAINING", True)]
        with pytest.raises(NoCapacity, match="none is ready"):
            await place(client, "r", 1, 1, 1)
        assert not second.draining.is_set()
        assert (await client.undrain("m.2")).name == "m"  # the id of any of its workers is enough
        await until(lambda: not second.held)
        assert await asked() == [("READY", False)]
        await place(client, "r", 2, 1, 1)
        assert (await client.drain("m.2")).worker_id == "m.2"
        await drains(second)


async def test_a_drain_is_reported_at_once():
    async with (
        SchedulerServer(Options(heartbeat_s=60.0)) as server,
        SchedulerClient(server.address) as client,
        working(client, identity("m")) as session,
    ):
        session.drain()
        await until_told(client, lambda told: told.workers[0].state == pb.WORKER_STATE_DRAINING)
        await session.ready(capacity())  # does not undo the drain
        assert (await client.describe()).workers[0].state == pb.WORKER_STATE_DRAINING


async def test_start_waits_for_the_scheduler():
    address = f"127.0.0.1:{free_port()}"
    async with SchedulerClient(address) as client:
        began = time.monotonic()
        with pytest.raises(SchedulerUnavailable):
            await WorkerSession(client, identity("m"), pb.WorkerLoad).start(0.6)
        assert time.monotonic() - began < 2 * PATIENCE
        late = WorkerSession(client, identity("m"), pb.WorkerLoad)
        starting = asyncio.create_task(late.start(10))
        async with SchedulerServer(Options(address=address)):
            await starting
            assert late.registered
            await late.close()


async def test_close_is_quick_when_the_scheduler_is_unreachable():
    async with SchedulerServer(Options()) as server:
        client = SchedulerClient(server.address)
        session = WorkerSession(client, identity("m"), pb.WorkerLoad)
        await session.start(30)
    began = time.monotonic()
    await session.close()
    await client.close()
    assert time.monotonic() - began < 2.5 * PATIENCE


class Cut(SchedulerClient):
    """Registrations at the address `at` fail."""

    def __init__(self, address):
        super().__init__(address)
        self.at = ""
        self.error = SchedulerUnavailable("the network is cut")

    async def register(self, identity, state, *, scheduler=""):
        if scheduler == self.at:
            raise self.error
        return await super().register(identity, state, scheduler=scheduler)


class Two(Schedulers):
    """Two schedulers without a shared store, and a client of both."""

    def __init__(self):
        super().__init__(heartbeat_s=0.05)
        self.client = Cut(",".join(self.addresses))

    async def close(self):
        await self.client.close()
        await super().close()

    def views(self):
        """Return the worker as each running scheduler knows it."""
        return [self.workers(number)["m"] for number in self.servers]

    def seen(self, number):
        """Return the worker's state at a scheduler; empty if it is unknown there."""
        found = self.workers(number).get("m")
        return short(found.state) if found else ""

    async def both_see(self, state):
        await until(lambda: self.seen(0) == self.seen(1) == state)


@pytest.fixture
async def two():
    made = Two()
    yield made
    await made.close()


@pytest.fixture
async def both(two):
    for number in (0, 1):
        await two.begin(number)
    return two


async def test_every_scheduler_gets_all_messages_of_a_worker(both):
    loads = iter(range(100_000))
    heard = []
    session = WorkerSession(
        both.client,
        loading(),
        lambda: pb.WorkerLoad(running=next(loads)),
        lambda reply, _: heard.append(reply.clock_s),
    )
    await session.start(30)
    assert both.seen(0) == both.seen(1) == "STARTING"
    await session.ready(capacity())
    assert both.seen(0) == both.seen(1) == "READY"
    await until(
        lambda: all(
            one.load and one.load.running > 10 and one.identity.HasField("capacity") for one in both.views()
        )
    )
    assert len(heard) < next(loads) * 0.7  # only the home scheduler's answers
    assert heard[0] > 1.7e9  # the scheduler's clock
    session.drain()
    await both.both_see("DRAINING")
    await session.close()
    assert both.seen(0) == both.seen(1) == ""


@pytest.mark.parametrize("away", [0, 1])
async def test_one_scheduler_is_enough_to_start(two, away):
    await two.begin(1 - away)
    async with working(two.client, identity("m")) as session:
        assert session.registered
        await two.begin(away)
        await two.both_see("READY")
        await session.become(pb.ROLE_DECODE)
        assert [one.role for one in two.views()] == [pb.ROLE_DECODE] * 2


async def test_a_worker_registers_again_with_a_restarted_scheduler(both):
    async with working(both.client, identity("m")) as session:
        await both.end(1)
        [joined] = both.views()
        await both.begin(1)
        await both.both_see("READY")
        assert both.views()[0] is joined  # it was not registered there again
        assert session.registered


async def test_one_scheduler_can_refuse_a_worker(both):
    large = identity("other")
    large.model = "large"
    await both.client.register(large, pb.WORKER_STATE_READY, scheduler=both.addresses[1])
    session = WorkerSession(both.client, identity("m"), pb.WorkerLoad)
    with pytest.raises(Refused, match="'large' in topic"):
        await session.start(30)
    await session.close()
    assert both.seen(0) == ""  # it has deregistered


async def test_a_scheduler_without_the_capacity_does_not_hear_ready(both):
    session = WorkerSession(both.client, loading(), pb.WorkerLoad)
    await session.start(30)
    both.client.at = both.addresses[1]
    await session.ready(capacity())
    assert both.seen(0) == "READY"
    heard_at = both.views()[1].heard_at
    began = asyncio.get_running_loop().time()

    def told():
        worker = both.views()[1]
        assert worker.state == pb.WORKER_STATE_STARTING or worker.identity.HasField("capacity")
        if asyncio.get_running_loop().time() > began + 0.3:
            both.client.at = ""
        return worker.heard_at > heard_at and worker.state == pb.WORKER_STATE_READY

    await until(told)
    await session.close()


async def test_a_role_refused_by_one_scheduler_is_reverted_at_all(both):
    async with working(both.client, identity("m")) as session:
        both.client.at, both.client.error = both.addresses[1], Refused("it has another deployment")
        with pytest.raises(Refused, match="another deployment"):
            await session.become(pb.ROLE_DECODE)
        both.client.at = ""
        await until(lambda: session.registered and all(one.role == pb.ROLE_MIXED for one in both.views()))


async def test_a_later_epoch_at_one_scheduler_is_passed_at_all_schedulers(both):
    """One scheduler knows an earlier process with this id."""
    earlier = identity("m")
    earlier.epoch = 50
    await both.client.register(earlier, pb.WORKER_STATE_READY, scheduler=both.addresses[1])
    async with working(both.client, identity("m")):
        await until(lambda: all(one.epoch > 50 for one in both.views()))


@pytest.mark.parametrize("asked", [0, 1])
async def test_one_scheduler_can_drain_a_worker(both, asked):
    async with working(both.client, identity("m")) as session:
        async with SchedulerClient(both.addresses[asked]) as operator:
            assert (await operator.drain("m")).worker_id == "m"
        await drains(session)
        await both.both_see("DRAINING")


async def test_a_worker_is_held_while_one_scheduler_knows_of_the_drain(both, monkeypatch):
    """The other scheduler has no store and does not know of the drain."""
    beats = 0

    def load():
        nonlocal beats
        beats += 1
        return pb.WorkerLoad()

    async def beaten():
        last = beats + 10
        await until(lambda: beats > last)

    async with SchedulerClient(both.addresses[1]) as operator:
        await operator.register(identity("m"), pb.WORKER_STATE_READY)
        await operator.drain("m")
        await operator.deregister("m")
    async with working(both.client, identity("m"), load) as session:
        assert session.held
        await beaten()
        await both.end(1)
        await beaten()
        assert session.held
        assert not session.draining.is_set()
        monkeypatch.setattr("baton.scheduler.worker_session.WORD_S", 0.01)
        await until(lambda: session.held is False)
        assert not session.draining.is_set()
