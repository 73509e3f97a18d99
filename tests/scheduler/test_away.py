"""Placing while Redis or the scheduler is down, or the scheduler has just started."""

import asyncio

import pytest
from grpc_health.v1 import health_pb2

from baton.protos import scheduler_pb2 as pb
from baton.scheduler.client import SchedulerClient
from baton.scheduler.errors import NoCapacity, SchedulerUnavailable
from baton.scheduler.service import SchedulerServer
from baton.scheduler.worker_session import WorkerSession
from baton.services.config import PolicySettings
from harness.scheduling import Options, capacity, free_port, identity, need, place, until, until_told
from tests.scheduler.test_service import D, M, P, add, figure, health


async def test_placing_works_without_redis(own_redis):
    """Redis is down at the start and once later. Drains made without it are written to it."""
    own_redis.stop()
    options = Options(store=own_redis.url, worker_lease_s=60.0)

    async def store_up(server, wanted):
        await until(lambda: figure(server, "store_up") == wanted)
        assert await health(server.address) == health_pb2.HealthCheckResponse.SERVING

    async with SchedulerServer(options) as server, SchedulerClient(server.address, router_id="r") as client:
        await store_up(server, 0)
        await add(client, ("p", P), ("d", D), ("spare", M))
        await place(client, "early", 1, 10, 1)
        assert (await client.drain("spare")).worker_id == "spare"
        assert "does not answer" in (await client.describe()).store_problem
        own_redis.start()
        await store_up(server, 1)
        async with SchedulerServer(options) as second, SchedulerClient(second.address) as operator:
            assert list((await operator.describe()).drained) == ["spare"]
            assert (await operator.undrain("spare")).name == "spare"
        await until_told(client, lambda told: not told.drained)
        own_redis.stop()
        await store_up(server, 0)
        await place(client, "late", 1, 10, 1)
        told = await client.describe()
        assert {one.attempt.request_id for one in told.attempts} == {"early", "late"}
        assert figure(server, "store_losses_total") == 2
        assert figure(server, "leases_expired_total") == 0


async def test_a_router_places_without_a_scheduler_and_reports_it_later():
    """After a restart, workers register again and routers report their bookings."""
    address = f"127.0.0.1:{free_port()}"
    options = Options(address=address, placement_lease_s=2.0, idle_decode_tokens=0)
    async with (
        SchedulerClient(address, router_id="r1", policy=PolicySettings()) as client,
        SchedulerClient(address) as workers,
    ):
        sessions = [
            WorkerSession(workers, identity(name, role), pb.WorkerLoad) for name, role in (("p", P), ("d", D))
        ]
        async with SchedulerServer(options):
            for session in sessions:
                await session.start(30)
                await session.ready(capacity())
            kept = await place(client, "kept", 1, 10, 1)
            client.reports.prefilled(kept.attempt)
            ended = await place(client, "ended", 1, 10, 1)
            await client.refresh()
        with pytest.raises(SchedulerUnavailable):
            await place(client, "probe")
        alone = client.place_from_snapshot(need("alone", 1, 10, 1, router_id=client.router_id))
        assert alone.from_snapshot
        assert (alone.prefill or alone.decode).worker_id == "p"
        client.reports.finished(ended.attempt, "stop")
        short = client.place_from_snapshot(need("short", 1, 10, 1, router_id=client.router_id))
        client.reports.finished(short.attempt, "stop", pb.Cost(output_tokens=3))
        async with SchedulerServer(options) as server:

            async def told():
                try:
                    description = await client.describe()
                except SchedulerUnavailable:
                    return False
                return {one.attempt.request_id for one in description.attempts} == {"kept", "alone"}

            await until(told)
            await until(lambda: figure(server, "adopted_total") >= 3)
            told_of = await client.describe()
            assert [one.attempt.request_id for one in told_of.handoffs] == ["short"]
            assert {one.attempt.request_id: one.prefilled for one in told_of.attempts} == {
                "kept": True,
                "alone": False,
            }
            await until_told(client, lambda told: len(told.workers) == 2)
            reserved = {one.identity.worker_id: one.reserved_requests for one in told_of.workers}
            assert reserved.get("d", 2) == 2
            for session in sessions:
                await session.close()


async def test_rejections_of_a_settling_scheduler_are_marked():
    async with (
        SchedulerServer(Options(worker_lease_s=0.5)) as server,
        SchedulerClient(server.address) as client,
    ):

        async def settles():
            with pytest.raises(NoCapacity) as caught:
                await place(client, "probe")
            assert caught.value.code == pb.Rejection.CODE_NO_WORKERS
            return caught.value.settling

        assert await settles()

        async def settled():
            return not await settles()

        await until(settled)


async def test_a_wrong_server_is_distinguished_from_none():
    nobody = f"127.0.0.1:{free_port()}"
    async with SchedulerClient(nobody) as client:
        with pytest.raises(SchedulerUnavailable, match=r"not answer \([^:;]*: Connection refused\); is"):
            await client.describe()
    speaks_http = await asyncio.start_server(an_http_server, "127.0.0.1", 0)
    port = speaks_http.sockets[0].getsockname()[1]
    async with speaks_http, SchedulerClient(f"127.0.0.1:{port}") as client:
        with pytest.raises(SchedulerUnavailable, match=r"\(something else listens there: [^;]*HTTP/2"):
            await client.describe()


async def an_http_server(reader, writer):
    """Answer gRPC as a router's HTTP server does."""
    await reader.readuntil(b"\r\n")
    writer.write(b"HTTP/1.1 505 HTTP Version Not Supported\r\nContent-Length: 0\r\n\r\n")
    await writer.drain()
    writer.close()
