"""A worker's session against real schedulers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from baton.protos import scheduler_pb2 as pb
from baton.scheduler.client import SchedulerClient
from baton.scheduler.errors import NoCapacity, Refused, SchedulerUnavailable
from baton.scheduler.service import SchedulerServer
from baton.scheduler.session import WorkerSession
from harness.scheduling import Options, capacity, free_port, identity, place, until
from harness.support import PATIENCE


@pytest.fixture
async def server() -> AsyncIterator[SchedulerServer]:
    async with SchedulerServer(Options(heartbeat_s=0.05, placement_lease_s=0.4)) as running:
        yield running


@pytest.fixture
async def client(server: SchedulerServer) -> AsyncIterator[SchedulerClient]:
    async with SchedulerClient(server.address) as made:
        yield made


async def test_a_workers_life(client: SchedulerClient) -> None:
    loads = iter(range(1_000))
    starting = identity("m")
    starting.ClearField("capacity")  # the engine is loading
    session = WorkerSession(client, starting, lambda: pb.WorkerLoad(running=next(loads)))
    await session.start(1)
    assert session.registered

    async def status() -> pb.WorkerStatus:
        workers = (await client.describe()).workers
        return workers[0] if workers else pb.WorkerStatus()

    assert (await status()).state == pb.WORKER_STATE_STARTING
    with pytest.raises(NoCapacity, match="none is ready"):
        await place(client, "r", 1, 1, 1)
    await session.ready(capacity())
    await place(client, "r", 1, 1, 1)

    async def heard() -> bool:
        return (await status()).load.running >= 2

    await until(heard)
    assert (await client.drain("m")).worker_id == "m"
    async with asyncio.timeout(2 * PATIENCE):
        await session.draining.wait()

    async def drains() -> bool:
        return (await status()).state == pb.WORKER_STATE_DRAINING

    await until(drains)
    await session.close()
    assert not (await client.describe()).workers


async def test_a_restarted_worker_of_a_drained_name_waits_to_be_undrained(client: SchedulerClient) -> None:
    def life(number: int) -> WorkerSession:
        one = identity(f"m.{number}")
        one.name = "m"
        return WorkerSession(client, one, pb.WorkerLoad)

    async def asked() -> list[tuple[str, bool]]:
        workers = (await client.describe()).workers
        return [
            (pb.WorkerState.Name(one.state).removeprefix("WORKER_STATE_"), one.drained) for one in workers
        ]

    first = life(1)
    await first.start(1)
    await first.ready(capacity())
    assert (await client.drain("m.1")).worker_id == "m.1"
    async with asyncio.timeout(20 * PATIENCE):
        await first.draining.wait()
    await first.close()
    assert list((await client.describe()).drained) == ["m"]
    second = life(2)
    await second.start(1)
    await second.ready(capacity())
    await until(lambda: bool(second.held))
    assert await asked() == [("DRAINING", True)]
    with pytest.raises(NoCapacity, match="none is ready"):
        await place(client, "r", 1, 1, 1)
    assert not second.draining.is_set()
    assert (await client.undrain("m.2")).name == "m"  # by the id of any of its workers
    await until(lambda: not second.held)
    assert await asked() == [("READY", False)]
    await place(client, "r", 2, 1, 1)
    assert (await client.drain("m.2")).worker_id == "m.2"
    async with asyncio.timeout(20 * PATIENCE):
        await second.draining.wait()
    await second.close()


async def test_a_drain_is_reported_at_once() -> None:
    async with (
        SchedulerServer(Options(heartbeat_s=60.0)) as server,
        SchedulerClient(server.address) as client,
    ):
        session = WorkerSession(client, identity("m"), pb.WorkerLoad)
        await session.start(1)
        await session.ready(capacity())
        session.drain()

        async def drains() -> bool:
            return (await client.describe()).workers[0].state == pb.WORKER_STATE_DRAINING

        await until(drains)
        await session.ready(capacity())  # does not undo the drain
        assert await drains()
        await session.close()


async def test_start_waits_for_the_scheduler() -> None:
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


async def test_close_is_quick_when_the_scheduler_is_away() -> None:
    server = SchedulerServer(Options())
    await server.__aenter__()
    client = SchedulerClient(server.address)
    session = WorkerSession(client, identity("m"), pb.WorkerLoad)
    await session.start(1)
    await server.__aexit__(None, None, None)
    began = time.monotonic()
    await session.close()
    await client.close()
    assert time.monotonic() - began < 2.5 * PATIENCE


class Cut(SchedulerClient):
    """Registrations at the address `at` fail."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.at = ""
        self.error: Exception = SchedulerUnavailable("the network is cut")

    async def register(
        self, identity: pb.WorkerIdentity, state: pb.WorkerState, *, scheduler: str = ""
    ) -> pb.RegisterReply:
        if scheduler == self.at:
            raise self.error
        return await super().register(identity, state, scheduler=scheduler)


class Two:
    """Two schedulers without a shared store, and a client of both."""

    def __init__(self) -> None:
        self.options = [Options(f"127.0.0.1:{free_port()}", heartbeat_s=0.05) for _ in range(2)]
        self.servers: list[SchedulerServer | None] = [None, None]
        self.client = Cut(",".join(one.address for one in self.options))

    async def begin(self, number: int) -> SchedulerServer:
        made = self.servers[number] = await SchedulerServer(self.options[number]).__aenter__()
        return made

    async def end(self, number: int) -> None:
        server, self.servers[number] = self.servers[number], None
        if server:
            await server.__aexit__(None, None, None)

    async def close(self) -> None:
        await self.client.close()
        for number in range(2):
            await self.end(number)

    def seen(self, number: int) -> str:
        """Return the worker's state at a scheduler; empty if it is unknown there."""
        server = self.servers[number]
        assert server
        found = server._roster.view().workers
        return pb.WorkerState.Name(found["m"].state).removeprefix("WORKER_STATE_") if "m" in found else ""

    async def both_see(self, state: str) -> None:
        await until(lambda: self.seen(0) == self.seen(1) == state)


@pytest.fixture
async def two() -> AsyncIterator[Two]:
    made = Two()
    yield made
    await made.close()


async def test_every_scheduler_gets_all_messages_of_a_worker(two: Two) -> None:
    await two.begin(0)
    await two.begin(1)
    loads = iter(range(100_000))
    heard: list[float] = []
    starting = identity("m")
    starting.ClearField("capacity")
    session = WorkerSession(
        two.client,
        starting,
        lambda: pb.WorkerLoad(running=next(loads)),
        lambda reply, _: heard.append(reply.clock_s),
    )
    await session.start(2)
    assert two.seen(0) == two.seen(1) == "STARTING"
    await session.ready(capacity())
    assert two.seen(0) == two.seen(1) == "READY"

    async def told() -> bool:
        views = [server._roster.view().workers["m"] for server in two.servers if server]
        return all(one.load.running > 10 and one.identity.HasField("capacity") for one in views)

    await until(told)
    assert len(heard) < next(loads) * 0.7  # only from its home
    assert heard[0] > 1.7e9  # the scheduler's clock
    session.drain()
    await two.both_see("DRAINING")
    await session.close()
    assert two.seen(0) == two.seen(1) == ""


@pytest.mark.parametrize("away", [0, 1])
async def test_one_scheduler_is_enough_to_start(two: Two, away: int) -> None:
    await two.begin(1 - away)
    session = WorkerSession(two.client, identity("m"), pb.WorkerLoad)
    await session.start(2)
    await session.ready(capacity())
    assert session.registered
    await two.begin(away)
    await two.both_see("READY")
    await session.become(pb.ROLE_DECODE)
    for server in two.servers:
        assert server
        assert server._roster.view().workers["m"].role == pb.ROLE_DECODE
    await session.close()


async def test_a_worker_registers_again_with_a_restarted_scheduler(two: Two) -> None:
    kept = await two.begin(0)
    await two.begin(1)
    session = WorkerSession(two.client, identity("m"), pb.WorkerLoad)
    await session.start(2)
    await session.ready(capacity())
    await two.end(1)
    joined = kept._roster.view().workers["m"]
    await two.begin(1)
    await two.both_see("READY")
    assert kept._roster.view().workers["m"] is joined  # it was not registered there again
    assert session.registered
    await session.close()


async def test_one_scheduler_can_refuse_a_worker(two: Two) -> None:
    await two.begin(0)
    await two.begin(1)
    large = identity("other")
    large.model = "large"
    await two.client.register(large, pb.WORKER_STATE_READY, scheduler=two.options[1].address)
    session = WorkerSession(two.client, identity("m"), pb.WorkerLoad)
    with pytest.raises(Refused, match="'large' in topic"):
        await session.start(2)
    await session.close()
    assert two.seen(0) == ""  # it has deregistered


async def test_a_scheduler_without_the_capacity_is_not_told_ready(two: Two) -> None:
    await two.begin(0)
    other = await two.begin(1)
    starting = identity("m")
    starting.ClearField("capacity")
    session = WorkerSession(two.client, starting, pb.WorkerLoad)
    await session.start(2)
    two.client.at = two.options[1].address
    await session.ready(capacity())
    assert two.seen(0) == "READY"
    heard_at = other._roster.view().workers["m"].heard_at

    async def told() -> bool:
        worker = other._roster.view().workers["m"]
        assert worker.state == pb.WORKER_STATE_STARTING or worker.identity.HasField("capacity")
        if asyncio.get_running_loop().time() > began + 0.3:
            two.client.at = ""
        return worker.heard_at > heard_at and worker.state == pb.WORKER_STATE_READY

    began = asyncio.get_running_loop().time()
    await until(told)
    await session.close()


async def test_a_role_refused_by_one_scheduler_is_reverted_at_all(two: Two) -> None:
    await two.begin(0)
    await two.begin(1)
    session = WorkerSession(two.client, identity("m"), pb.WorkerLoad)
    await session.start(2)
    await session.ready(capacity())
    two.client.at, two.client.error = two.options[1].address, Refused("it has another deployment")
    with pytest.raises(Refused, match="another deployment"):
        await session.become(pb.ROLE_DECODE)
    two.client.at = ""

    async def as_before() -> bool:
        views = [server._roster.view().workers["m"] for server in two.servers if server]
        return session.registered and all(one.role == pb.ROLE_MIXED for one in views)

    await until(as_before)
    await session.close()


async def test_a_later_epoch_at_one_scheduler_is_passed_at_all(two: Two) -> None:
    """One scheduler knows an earlier process with this id."""
    await two.begin(0)
    await two.begin(1)
    earlier = identity("m")
    earlier.epoch = 50
    await two.client.register(earlier, pb.WORKER_STATE_READY, scheduler=two.options[1].address)
    session = WorkerSession(two.client, identity("m"), pb.WorkerLoad)
    await session.start(2)
    await until(
        lambda: all(server._roster.view().workers["m"].epoch > 50 for server in two.servers if server)
    )
    await session.close()


@pytest.mark.parametrize("asked", [0, 1])
async def test_one_scheduler_can_drain_a_worker(two: Two, asked: int) -> None:
    await two.begin(0)
    await two.begin(1)
    session = WorkerSession(two.client, identity("m"), pb.WorkerLoad)
    await session.start(2)
    await session.ready(capacity())
    async with SchedulerClient(two.options[asked].address) as operator:
        assert (await operator.drain("m")).worker_id == "m"
    async with asyncio.timeout(2 * PATIENCE):
        await session.draining.wait()
    await two.both_see("DRAINING")
    await session.close()


async def test_a_worker_is_held_while_one_scheduler_knows_of_the_drain(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other scheduler has no store and does not know of the drain."""
    await two.begin(0)
    await two.begin(1)
    beats = 0

    def load() -> pb.WorkerLoad:
        nonlocal beats
        beats += 1
        return pb.WorkerLoad()

    async def beaten() -> None:
        last = beats + 10
        await until(lambda: beats > last)

    async with SchedulerClient(two.options[1].address) as operator:
        await operator.register(identity("m"), pb.WORKER_STATE_READY)
        await operator.drain("m")
        await operator.deregister("m")
    session = WorkerSession(two.client, identity("m"), load)
    await session.start(2)
    await session.ready(capacity())
    assert session.held
    await beaten()
    await two.end(1)
    await beaten()
    assert session.held
    assert not session.draining.is_set()
    monkeypatch.setattr("baton.scheduler.session.WORD_S", 0.01)
    await until(lambda: session.held is False)
    assert not session.draining.is_set()
    await session.close()
