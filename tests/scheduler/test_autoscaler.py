"""Autoscaling by real schedulers: one decides, its orders reach fleets, and workers change their roles."""

import asyncio
import logging
import math
import random
import time
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import pytest

from baton.autoscale.balance import PAUSE, Balance
from baton.autoscale.goals import Bounds, Goals
from baton.protos import scheduler_pb2 as pb
from baton.scheduler.autoscaler import Autoscaler, seen
from baton.scheduler.client import SchedulerClient
from baton.scheduler.ledger import Ledger
from baton.scheduler.members import Members
from baton.scheduler.metrics import Metrics
from baton.scheduler.roster import Roster, Settling
from baton.scheduler.service import SchedulerServer
from baton.scheduler.store.base import MemoryStore
from baton.scheduler.types import FleetView, Reserved, Told, WorkerRecord
from baton.tasks import spawn, stop
from harness.scheduling import LEASE_S, Options, identity, place, register, until, working
from tests.scheduler.conftest import Changer

P, D = pb.ROLE_PREFILL, pb.ROLE_DECODE
PLACES = [pb.Place(name=name) for name in ("p", "d", "x", "y")]


def goals(mode="on", least=2):
    """Ask for at least two decode workers, one more than are running."""
    return Goals(mode, 1.0, 0.05, Bounds(1, 4), Bounds(least, 4), 0.05, 0.5, 0.1)


@asynccontextmanager
async def scheduler(url, topic, wanted, **options):
    """Run a scheduler that decides nothing until `settle` is called."""
    async with (
        SchedulerServer(Options(store=url, topic=topic, **options), goals=wanted) as server,
        SchedulerClient(server.address, router_id="router") as client,
    ):
        server._servicer.settling._until = math.inf
        yield server, client


def settle(server):
    """Let a scheduler decide at once: it knows all workers."""
    server._servicer.settling._settle_s = server._servicer.settling._until = 0.0


@asynccontextmanager
async def deployed(url, topic, wanted, **options):
    """Run a scheduler with a prefill and a decode worker."""
    async with (
        scheduler(url, topic, wanted, **options) as (server, client),
        working(client, identity("p", P)),
        working(client, identity("d", D)),
    ):
        settle(server)
        yield server, client


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
    async with deployed("memory", topic, goals()) as (server, client):
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
    async with deployed("memory", topic, goals("advise")) as (server, client):
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
    async with deployed("memory", topic, goals(least=1)) as (_, client):
        await ordered(client, "p", "d")
        found = pb.OrdersReply()

        async def told():
            nonlocal found
            found = await client.orders("another", [pb.Place(name="z")])
            return bool(found.fence)

        await until(told)
        assert not found.orders


@asynccontextmanager
async def flipping(server, client):
    """Run a prefill worker and two decode workers; yield the first of these, the only one asked to change."""
    async with (
        working(client, identity("p", P)),
        Changer().registered(client, identity("d1", D)) as first,
        Changer().registered(client, identity("d2", D)) as other,
    ):
        settle(server)
        yield first
        assert not other.asked


async def test_a_role_change_is_a_call_with_the_fence(topic):
    wanted = replace(goals(), prefill=Bounds(2, 2), decode=Bounds(1, 1))
    async with (
        scheduler("memory", topic, wanted) as (server, client),
        flipping(server, client) as flips,
    ):
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
        flipping(server, client) as flips,
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
    monkeypatch.setattr("baton.autoscale.balance.PAUSE", 1e6)
    async with balancing(monkeypatch, 0.05) as (store, metrics, flipped):
        await until(lambda: flipped)
        await lose_the_lease(store, metrics)
        await asyncio.sleep(0.3)
        assert len(flipped) == 1


async def test_pressure_from_before_the_lease_was_lost_does_not_count(monkeypatch):
    async with balancing(monkeypatch, 2.5) as (store, metrics, flipped):
        await asyncio.sleep(0.1)  # it sees the pressure
        await lose_the_lease(store, metrics, for_s=0.5)
        regained = time.monotonic()
        await until(lambda: flipped)
        assert time.monotonic() - regained > 2.3


async def test_another_scheduler_takes_over_with_a_higher_fence(redis_server, topic, monkeypatch):
    monkeypatch.setattr("baton.scheduler.autoscaler.ROLE_TIMEOUT_S", 1.2)  # the lease is a little longer
    async with AsyncExitStack() as first:
        one, _ = await first.enter_async_context(scheduler(redis_server.url, topic, goals()))
        async with (
            scheduler(redis_server.url, topic, goals(least=3)) as (other, client),
            SchedulerClient(f"{one.address},{other.address}") as both,
            working(both, identity("p", P)),
            working(both, identity("d", D)),
        ):
            settle(one)
            await until(lambda: figure(one, "leads") == 1)
            settle(other)
            before = await ordered(client, "p", "d", "x")
            assert figure(other, "leads") == 0
            await first.aclose()
            after = await ordered(client, "p", "d", "x", "y")  # by its own goals
            assert after.fence > before.fence
            assert figure(other, "leads") == 1


async def test_nothing_changes_without_the_store(own_redis, topic):
    async with deployed(own_redis.url, topic, goals()) as (server, client):
        before = await ordered(client, "p", "d", "x")
        own_redis.stop()

        async def leaves_all_as_it_is():
            return not (await client.orders("fleet", PLACES)).fence and figure(server, "leads") == 0

        await until(leaves_all_as_it_is)
        own_redis.start()  # it is empty, and fences still rise
        after = await ordered(client, "p", "d", "x")
        assert after.fence > before.fence


# -- balance: roles change only under lasting pressure, and not back and forth

M = pb.ROLE_MIXED
AFTER_S = 10.0


def worker(name, role, reserved=None, blocks_used=-1, **changes):
    """Return a worker with steps of 512 tokens, batches of 4 and 99 blocks, which runs its bookings."""
    who = identity(name, role, **changes)
    booked = reserved or Reserved()
    used = booked.blocks if blocks_used < 0 else blocks_used
    load = pb.WorkerLoad(running=booked.requests if used else 0, free_blocks=max(0, 99 - used))
    return WorkerRecord(who, pb.WORKER_STATE_READY, load, booked, False, 5.0)


class Cluster:
    def __init__(self, *workers):
        self.now = 0.0
        self.workers = {one.worker_id: one for one in workers}
        self.balance = Balance(AFTER_S)

    def look(self):
        return self.balance.look(seen(FleetView(self.workers), Told(), self.now))

    def first_flip(self, seconds, every_s=0.5):
        """Look at intervals; return the first change, at `now`."""
        until = self.now + seconds
        while self.now < until:
            if flip := self.look():
                return flip
            self.now += every_s
        return None


def waiting(tokens):
    return Reserved(prompt_tokens=tokens, requests=tokens // 100)


def decoding(requests):
    return Reserved(requests=requests, blocks=requests * 10)


def test_the_idlest_decode_worker_changes_when_prompts_queue():
    one = Cluster(worker("p", P, waiting(2_000)), worker("d1", D, decoding(1)), worker("d2", D))
    flip = one.first_flip(60)
    assert (flip.member.worker_id, flip.role) == ("d2", P)
    assert one.now == AFTER_S
    assert one.first_flip(60) is not None
    assert one.now == (1 + PAUSE) * AFTER_S
    assert "prefill side was at 3.9 for 10 s" in flip.why


def test_a_few_long_requests_are_no_full_side():
    """Their KV takes two thirds of the blocks, so a third one fits."""
    long = worker("d", D, Reserved(requests=2, blocks=67))
    assert Cluster(worker("p1", P), worker("p2", P), long).first_flip(60) is None


FULL_CACHE, COMING = Reserved(requests=1, blocks=95), Reserved(requests=4, blocks=40)


@pytest.mark.parametrize(
    ("workers", "name", "role"),
    [
        ([worker("p1", P, waiting(100)), worker("p2", P), worker("d", D, decoding(4))], "p2", D),
        ([worker("p1", P, waiting(100)), worker("p2", P), worker("d", D, FULL_CACHE)], "p2", D),
        # Requests that wait for their prefill are no pressure on decode workers.
        ([worker("p", P, waiting(2_000)), *(worker(d, D, COMING, 0) for d in ("d1", "d2"))], "d1", P),
    ],
    ids=["full batches", "a full cache", "long queues"],
)
def test_a_worker_of_the_other_side_changes_under_pressure(workers, name, role):
    flip = Cluster(*workers).first_flip(60)
    assert (flip.member.worker_id, flip.role) == (name, role)


def test_pressure_must_last():
    one = Cluster(worker("p", P, waiting(2_000)), worker("d1", D), worker("d2", D))
    assert one.first_flip(AFTER_S) is None
    one.workers["p"] = worker("p", P, waiting(100))
    assert one.look() is None
    one.workers["p"] = worker("p", P, waiting(2_000))
    assert one.first_flip(AFTER_S) is None
    assert one.first_flip(1) is not None


@pytest.mark.parametrize(
    "workers",
    [
        [worker("p", P, waiting(2_000)), worker("d", D)],  # the last decode worker
        [worker("p", P, waiting(2_000)), worker("d1", D, decoding(2)), worker("d2", D, decoding(2))],  # busy
        [worker("p", P, waiting(600)), worker("d1", D), worker("d2", D)],  # a short queue
        [  # one worker has no room for the bookings of both
            worker("p", P, waiting(2_000)),
            worker("d1", D, Reserved(requests=6, blocks=60), 0),
            worker("d2", D, Reserved(requests=6, blocks=60), 0),
        ],
        [worker("p1", P), worker("p2", P), worker("d1", D), worker("d2", D)],
        [worker("d1", D), worker("d2", D)],  # no prefill worker
        [worker("p", P, waiting(2_000)), worker("m1", M), worker("m2", M)],
        [
            worker("p", P, waiting(2_000)),
            worker("d1", D, compatibility_hash=""),
            worker("d2", D, compatibility_hash=""),
        ],
    ],
)
def test_no_change(workers):
    assert Cluster(*workers).first_flip(100) is None


def gang(name, role, *booked):
    seats = [pb.Gang(name=name, rank=rank, size=len(booked), life="one") for rank in range(len(booked))]
    members = [worker(f"{name}.r{seat.rank}", role, one) for seat, one in zip(seats, booked, strict=True)]
    for one, seat in zip(members, seats, strict=True):
        one.identity.gang.CopyFrom(seat)
        one.__post_init__()
    return members


def test_a_gang_changes_as_a_whole():
    busy = gang("d1", D, decoding(1), Reserved())
    one = Cluster(worker("p", P, waiting(2_000)), *busy, *gang("d2", D, Reserved(), Reserved()))
    flip = one.first_flip(60)
    assert flip.member.worker_id == "d2.r0"
    lone = Cluster(worker("p", P, waiting(2_000)), *gang("d2", D, Reserved(), Reserved()))
    assert lone.first_flip(100) is None, "no other decode worker is left"
    half = Cluster(worker("p", P, waiting(2_000)), *busy, *gang("d2", D, Reserved(), Reserved())[:1])
    assert half.first_flip(100) is None, "it is not whole"


def test_all_workers_of_a_gang_are_missed():
    """The load of two workers does not fit on the other two, although three workers could take it."""
    others = gang("d1", D, decoding(1), decoding(2))
    one = Cluster(worker("p", P, waiting(2_000)), *others, *gang("d2", D, decoding(1), decoding(1)))
    assert one.first_flip(100) is None
    alone = Cluster(worker("p", P, waiting(2_000)), *others, worker("d2", D), worker("d3", D, decoding(1)))
    assert alone.first_flip(100) is not None


def test_a_change_does_not_cause_the_opposite_one():
    def fleet(prefills, decodes, tokens, requests):
        return [
            *(worker(f"p{n}", P, waiting(tokens // prefills)) for n in range(prefills)),
            *(worker(f"d{n}", D, decoding(requests // decodes)) for n in range(decodes)),
        ]

    draw = random.Random(1)
    for _ in range(200):
        prefills, decodes = draw.randint(1, 6), draw.randint(1, 6)
        load = draw.randrange(12_000), draw.randrange(24)
        one = Cluster(*fleet(prefills, decodes, *load))
        if flip := one.first_flip(100, AFTER_S / 2):
            change = 1 if flip.role == P else -1
            after = fleet(prefills + change, decodes - change, *load)
            one.workers = {worker.worker_id: worker for worker in after}
            again = one.first_flip(PAUSE * 100, AFTER_S / 2)
            assert again is None or again.role == flip.role, (prefills, decodes, *load)


def test_encode_workers_are_left_alone():
    idle = [worker(f"e{number}", pb.ROLE_ENCODE) for number in range(3)]
    assert Cluster(worker("p", P, waiting(2_000)), worker("d", D), *idle).first_flip(60) is None
    full = Reserved(prompt_tokens=9_000, requests=9)
    busy = [worker(f"e{number}", pb.ROLE_ENCODE, full) for number in range(3)]
    assert Cluster(worker("p1", P), worker("p2", P), worker("d", D), *busy).first_flip(60) is None
