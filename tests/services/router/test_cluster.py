import asyncio
import contextlib

from baton.protos import scheduler_pb2 as pb
from baton.scheduler.client import SchedulerClient
from baton.scheduler.service import SchedulerServer
from baton.services.config import PolicySettings
from baton.services.router import cluster as clusters
from baton.services.router.cluster import ClusterView
from harness import scheduling
from harness.fake_worker import FakeWorker, answer, until
from harness.scheduling import Options
from harness.support import free_port


@contextlib.asynccontextmanager
async def watched(view):
    watching = asyncio.create_task(view.watch())
    try:
        yield
    finally:
        watching.cancel()


async def test_a_loss_is_counted_once_per_scheduler_that_answered_before():
    address = f"127.0.0.1:{free_port()}"
    losses = 0

    def lost():
        nonlocal losses
        losses += 1

    async with (
        SchedulerClient(address, router_id="r1", policy=PolicySettings()) as client,
        watched(ClusterView(client, 5.0, lost=lost)),
    ):
        await until(lambda: not client.answering, "nobody answers yet")
        assert losses == 0
        async with SchedulerServer(Options(address=address)):
            await until(lambda: client.standby.lease_s, "it answers")
        await until(lambda: losses == 1, "it is lost")
        client.standby.lease_s = 0.0
        async with SchedulerServer(Options(address=address)):
            await until(lambda: client.standby.lease_s, "another one answers")
        await until(lambda: losses == 2, "that is lost, too")


async def test_a_chosen_worker_is_known_even_if_the_scheduler_dies_right_after(cluster, monkeypatch):
    """The worker may have registered after the last snapshot."""
    monkeypatch.setattr(clusters, "POLL_S", 60.0)
    async with watched(cluster.view):
        await until(lambda: cluster.scheduler.standby.lease_s, "the first snapshot came")
        await cluster.members.add(FakeWorker("m0", pb.ROLE_MIXED))
        assert (await cluster.ask([5, 6, 7])).tokens == answer([5, 6, 7], 8)
        await until(cluster.view.ready, "it is known")
        await cluster.lose_scheduler()
        assert (await cluster.ask([5, 6, 8])).tokens == answer([5, 6, 8], 8)


async def test_an_unknown_worker_costs_only_a_few_snapshots(cluster, monkeypatch):
    taken = 0
    refresh = cluster.scheduler.refresh

    async def counted(*about):
        nonlocal taken
        taken += 1
        return await refresh(*about)

    monkeypatch.setattr(cluster.scheduler, "refresh", counted)
    monkeypatch.setattr(clusters, "POLL_S", 60.0)
    monkeypatch.setattr(clusters, "HURRY_S", 0.3)
    async with watched(cluster.view):
        await until(lambda: taken == 1, "the first snapshot came")
        for number in range(100):
            cluster.view.chosen(f"gone{number % 2}")
        await until(lambda: not cluster.view._missing, "it has given up")
        assert 2 <= taken <= 2 + clusters.HURRY_S / clusters.HURRY_POLL_S


async def test_encode_workers_alone_serve_nothing(cluster):
    await cluster.members.add(FakeWorker("e0", pb.ROLE_ENCODE))
    assert await cluster.view.health()
    assert cluster.view.ready() == 0
    await cluster.members.add(FakeWorker("m0", pb.ROLE_MIXED))

    async def ready():
        await cluster.scheduler.refresh()
        return cluster.view.ready() == 1

    await scheduling.until(ready)
