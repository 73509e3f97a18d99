"""Autoscaling by real schedulers: one decides, and its orders reach fleets."""

import asyncio
import logging
import time
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial

import grpc.aio

from baton.autoscale.goals import Bounds, Goals
from baton.protos import scheduler_pb2 as pb
from baton.protos import worker_pb2, worker_pb2_grpc
from baton.scheduler.autoscaler import Autoscaler
from baton.scheduler.client import SchedulerClient
from baton.scheduler.ledger import Ledger
from baton.scheduler.members import Members
from baton.scheduler.metrics import Metrics
from baton.scheduler.roster import Roster, Settling
from baton.scheduler.service import SchedulerServer
from baton.scheduler.store.base import MemoryStore
from baton.scheduler.worker_session import WorkerSession
from baton.tasks import spawn, stop
from harness.scheduling import LEASE_S, Options, capacity, identity, place, register, until

P, D = pb.ROLE_PREFILL, pb.ROLE_DECODE
PLACES = [pb.Place(name=name) for name in ("p", "d", "x", "y")]


def goals(mode="on", least=2):
    """Ask for at least two decode workers, one more than are running."""
    return Goals(mode, 1.0, 0.05, Bounds(1, 4), Bounds(least, 4), 0.05, 0.5, 0.1)


@asynccontextmanager
async def scheduler(url, topic, wanted, **options):
    # The scheduler settles after a lease.
    settings = Options(store=url, topic=topic, worker_lease_s=0.5, **options)
    async with (
        SchedulerServer(settings, goals=wanted) as server,
        SchedulerClient(server.address, router_id="router") as client,
    ):
        yield server, client


@asynccontextmanager
async def working(client, *workers):
    async with AsyncExitStack() as stack:
        for name, role in workers:
            session = WorkerSession(client, identity(name, role), pb.WorkerLoad)
            await session.start(5.0)
            stack.push_async_callback(session.close)
            await session.ready(capacity())
        yield


def figure(server, name, **labels):
    name = f"baton_scheduler_autoscale_{name}"
    return server.metrics.registry.get_sample_value(name, labels) or 0.0


async def ordered(client, *names):
    """Ask as a fleet does, until the orders fill these places."""
    found = pb.OrdersReply()

    async def so():
        nonlocal found
        found = await client.orders("fleet", PLACES)
        return bool(found.fence) and sorted(one.name for one in found.orders) == sorted(names)

    await until(so)
    return found


async def test_a_missing_worker_is_ordered_once(topic):
    async with scheduler("memory", topic, goals()) as (server, client), working(client, ("p", P), ("d", D)):
        reply = await ordered(client, "p", "d", "x")
        assert {one.name: one.role for one in reply.orders} == {"p": P, "d": D, "x": D}
        assert figure(server, "leads") == 1
        assert figure(server, "wanted_workers", role="decode") == 2
        steps = figure(server, "step_seconds_count")
        await client.refresh(pb.RouterLoad(over=1))
        await until(lambda: figure(server, "step_seconds_count") > steps + 3)
        assert figure(server, "orders_total", order="start") == 1
        again = await client.orders("fleet", PLACES)
        assert (again.fence, len(again.orders)) == (reply.fence, 3)
        assert not (await client.orders("another", [])).fence


async def test_advice_is_logged_once_and_changes_nothing(topic, caplog):
    caplog.set_level(logging.WARNING, "baton.scheduler.autoscaler")
    async with (
        scheduler("memory", topic, goals("advise")) as (server, client),
        working(client, ("p", P), ("d", D)),
    ):
        await client.orders("fleet", PLACES)
        await until(
            lambda: (
                figure(server, "step_seconds_count") > 5
                and figure(server, "wanted_workers", role="decode") == 2
            )
        )
        assert not (await client.orders("fleet", PLACES)).fence
    said = [one.getMessage() for one in caplog.records]
    advice = "advice: 1 prefill + 2 decode would be enough, 1 prefill + 1 decode are running"
    assert sum(one.startswith(advice) for one in said) == 1, said


async def test_a_fleet_may_be_ordered_to_run_nothing(topic):
    async with scheduler("memory", topic, goals(least=1)) as (_, client), working(client, ("p", P), ("d", D)):
        await ordered(client, "p", "d")
        found = pb.OrdersReply()

        async def told():
            nonlocal found
            found = await client.orders("another", [pb.Place(name="z")])
            return bool(found.fence)

        await until(told)
        assert not found.orders


class Flips(worker_pb2_grpc.WorkerServicer):
    """Two decode workers at one address, without engines. The first one is asked to change its role."""

    def __init__(self):
        self.asked = []
        self.sessions = []

    async def SetRole(self, request, context):
        del context
        self.asked.append((request.role, request.fence))
        await self.sessions[0].become(request.role)
        return worker_pb2.SetRoleReply()


@asynccontextmanager
async def flipping(client):
    flips = Flips()
    worker = grpc.aio.server()
    worker_pb2_grpc.add_WorkerServicer_to_server(flips, worker)
    port = worker.add_insecure_port("127.0.0.1:0")
    await worker.start()
    async with working(client, ("p", P)), AsyncExitStack() as stack:
        for name in ("d1", "d2"):
            one = identity(name, D)
            one.address = f"127.0.0.1:{port}"
            session = WorkerSession(client, one, partial(pb.WorkerLoad, free_blocks=99))
            await session.start(5.0)
            stack.push_async_callback(session.close)
            await session.ready(capacity())
            flips.sessions.append(session)
        yield flips
    await worker.stop(None)


async def test_a_role_change_is_a_call_with_the_fence(topic):
    wanted = replace(goals(), prefill=Bounds(2, 2), decode=Bounds(1, 1))
    async with scheduler("memory", topic, wanted) as (server, client), flipping(client) as flips:
        await until(lambda: figure(server, "orders_total", order="flip") == 1)
        steps = figure(server, "step_seconds_count")
        await until(lambda: figure(server, "step_seconds_count") > steps + 3)
        ((role, fence),) = flips.asked  # once
        assert role == P
        assert fence > 0


async def test_roles_alone_change(topic, monkeypatch):
    monkeypatch.setattr("baton.scheduler.autoscaler.BALANCE_S", 0.05)
    monkeypatch.setattr("baton.scheduler.service.BALANCE_AFTER_S", 0.1)
    options = {"idle_decode_tokens": 0, "max_queued_prompt_tokens": 2_000}
    async with (
        scheduler("memory", topic, goals("roles"), **options) as (server, client),
        flipping(client) as flips,
    ):
        for request_id in ("a", "b"):  # together more than two steps of the prefill worker
            await place(client, request_id, prompt=600)
        await until(lambda: flips.asked)
        ((role, fence),) = flips.asked
        assert role == P
        assert fence > 0
        changes = "baton_scheduler_role_changes_total"
        await until(lambda: server.metrics.registry.get_sample_value(changes, {"by": "balance"}) == 1)


class Leases(MemoryStore):
    """Grants the lease while `fence` is not 0."""

    fence = 1

    async def lead(self, who, for_s):
        del who, for_s
        return self.fence


@asynccontextmanager
async def balancing(monkeypatch, after_s):
    """Rebalance a deployment that stays short of prefill workers; yield the workers that change roles."""
    flipped = []

    async def set_role(worker, role, fence):
        del role, fence
        flipped.append(worker.worker_id)
        return ""

    monkeypatch.setattr("baton.scheduler.autoscaler.set_role", set_role)
    monkeypatch.setattr("baton.scheduler.autoscaler.BALANCE_S", 0.01)
    ledger = Ledger(LEASE_S)
    roster = Roster("t", LEASE_S, ledger)
    register(roster, "p", P)
    ledger.join("p").prompt_tokens = 2_000
    for name in ("d1", "d2"):
        register(roster, name, D)
    store, metrics = Leases(), Metrics()
    scaler = Autoscaler(None, after_s, store, roster, Members(store), settling=Settling(0.0), metrics=metrics)
    task = spawn(scaler.run(), "autoscaler")
    yield store, metrics, flipped
    await stop(task)


async def lose_the_lease(store, metrics, for_s=0.0):
    store.fence = 0
    await until(lambda: not metrics.registry.get_sample_value("baton_scheduler_autoscale_leads"))
    await asyncio.sleep(for_s)
    store.fence = 2


async def test_the_pause_between_two_role_changes_outlasts_the_lease(monkeypatch):
    monkeypatch.setattr("baton.scheduler.autoscaler.PAUSE", 1e6)
    async with balancing(monkeypatch, 0.05) as (store, metrics, flipped):
        await until(lambda: flipped)
        await lose_the_lease(store, metrics)
        await asyncio.sleep(0.3)
        assert len(flipped) == 1


async def test_pressure_from_before_the_lease_was_lost_does_not_count(monkeypatch):
    async with balancing(monkeypatch, 1.0) as (store, metrics, flipped):
        await asyncio.sleep(0.1)  # it sees the pressure
        await lose_the_lease(store, metrics, for_s=1.0)
        regained = time.monotonic()
        await until(lambda: flipped)
        assert time.monotonic() - regained > 0.9


async def test_another_scheduler_takes_over_with_a_higher_fence(redis_server, topic, monkeypatch):
    monkeypatch.setattr("baton.scheduler.autoscaler.ROLE_TIMEOUT_S", 0.2)
    async with AsyncExitStack() as first:
        one, _ = await first.enter_async_context(scheduler(redis_server.url, topic, goals()))
        await until(lambda: figure(one, "leads") == 1)
        async with (
            scheduler(redis_server.url, topic, goals(least=3)) as (other, client),
            SchedulerClient(f"{one.address},{other.address}") as both,
            working(both, ("p", P), ("d", D)),
        ):
            before = await ordered(client, "p", "d", "x")
            assert figure(other, "leads") == 0
            await first.aclose()
            after = await ordered(client, "p", "d", "x", "y")  # by its own goals
            assert after.fence > before.fence
            assert figure(other, "leads") == 1


async def test_nothing_changes_without_the_store(own_redis, topic):
    async with (
        scheduler(own_redis.url, topic, goals()) as (server, client),
        working(client, ("p", P), ("d", D)),
    ):
        before = await ordered(client, "p", "d", "x")
        own_redis.stop()

        async def leaves_all_as_it_is():
            return not (await client.orders("fleet", PLACES)).fence and figure(server, "leads") == 0

        await until(leaves_all_as_it_is)
        own_redis.start()  # it is empty, and fences still rise
        after = await ordered(client, "p", "d", "x")
        assert after.fence > before.fence
