"""The scheduler over real gRPC."""

import asyncio
import threading
import time

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.protos import scheduler_pb2 as pb
from baton.protos import scheduler_pb2_grpc as rpc
from baton.rpc import aio_channel
from baton.scheduler.client import SchedulerClient
from baton.scheduler.errors import NoCapacity, Refused, StaleWorker
from baton.scheduler.need import need_to_wire
from baton.scheduler.service import SchedulerServer
from baton.scheduler.types import LIMITS, same_limits
from baton.scheduler.worker_session import WorkerSession
from baton.security.names import Role
from baton.services.config import PolicySettings
from harness.scheduling import Options, capacity, identity, need, place, until, until_told, working
from harness.support import CALL_S

P, D, M = pb.ROLE_PREFILL, pb.ROLE_DECODE, pb.ROLE_MIXED


def figure(server, name, **labels):
    return server.metrics.registry.get_sample_value(f"baton_scheduler_{name}", labels) or 0.0


class Sent:
    """The messages of a stream: an empty one and, after `go_on`, a request for a placement."""

    def __init__(self, need):
        self._need = need
        self.go_on = threading.Event()

    def __iter__(self):
        yield pb.ExchangeRequest()
        self.go_on.wait()
        yield pb.ExchangeRequest(needs=[need_to_wire(self._need)])


async def add(client, *workers):
    for name, role in workers:
        await client.register(identity(name, role), pb.WORKER_STATE_READY)


async def health(address, service=""):
    async with aio_channel(address, Role.SCHEDULER) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        reply = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=CALL_S)
        return int(reply.status)


async def test_heartbeats_return_the_peers_reference(client, monkeypatch):
    monkeypatch.setattr("baton.scheduler.roster.PEERS_AGE_S", 0.0)
    load = pb.WorkerLoad(drafting=pb.Drafting(learned_reference=0.75))
    for name in ("a", "b"):
        await client.register(identity(name, D, speculative_method="mtp"), pb.WORKER_STATE_READY)
        await client.heartbeat(name, pb.WORKER_STATE_READY, load)
    assert (await client.heartbeat("a", pb.WORKER_STATE_READY, load)).peer_reference == 0.75
    assert (await client.heartbeat("a", pb.WORKER_STATE_READY, pb.WorkerLoad())).peer_reference == 0.0


async def test_a_requests_life(server, client):
    await add(client, ("p", P), ("d", D))
    placed = await place(client, "r", 1, 100, 10)
    assert placed.prefill.worker_id == "p"
    decode = pb.Worker(worker_id="d", address=identity("d").address, role=D, model_fingerprint="f1")
    assert placed.decode == decode
    told = await client.describe()
    assert [worker.identity.worker_id for worker in told.workers] == ["p", "d"]
    assert (told.workers[0].reserved_prompt_tokens, told.workers[1].reserved_blocks) == (100, 8)
    assert told.workers[0].heartbeat_age_s < 30
    assert [one.attempt.request_id for one in told.attempts] == ["r"]
    await until(lambda: figure(server, "live_attempts") == 1)
    await until(lambda: figure(server, "workers", role="prefill", state="ready") == 1)
    assert figure(server, "store_up") == 1
    client.reports.prefilled(placed.attempt)
    client.reports.finished(placed.attempt, "stop", pb.Cost(handoff_ms=1.5, transport="shm"))
    await until_told(client, lambda told: not told.attempts)
    told = await client.describe()
    assert all(worker.reserved_requests == 0 for worker in told.workers)
    assert (told.handoffs[0].prefill_worker_id, told.handoffs[0].cost.transport) == ("p", "shm")
    assert figure(server, "placements_total", kind="pair") == 1


async def test_no_capacity_has_a_reason_and_a_retry_time(server, client):
    async def rejection(prompt=1, match=None):
        with pytest.raises(NoCapacity, match=match) as caught:
            await place(client, "r", 1, prompt)
        return caught.value.code, caught.value.retry_after_s

    no_workers = await rejection(match="no worker to take the request is registered")
    assert no_workers == (pb.Rejection.CODE_NO_WORKERS, 2.0)
    await add(client, ("m", M))
    assert await rejection(2_000) == (pb.Rejection.CODE_TOO_LARGE, 0.0)
    for number in range(8):
        await place(client, f"r{number}")
    assert await rejection() == (pb.Rejection.CODE_FULL, 1.0)
    for code in ("no_workers", "too_large", "full"):
        assert figure(server, "rejections_total", code=code) == 1


async def test_an_attempt_is_fenced_by_the_next(server, client):
    await add(client, ("p", P), ("d", D), ("d2", D))
    first = await place(client, "r", 1, 100, 10)
    other = "d2" if first.decode.worker_id == "d" else "d"
    second = await place(client, "r", 2, 105, 5, first.decode.worker_id)
    assert second.decode.worker_id == other
    with pytest.raises(NoCapacity) as caught:
        await place(client, "r", 2, 105, 5)
    assert caught.value.code == pb.Rejection.CODE_STALE_EPOCH
    client.reports.finished(first.attempt, "retried")
    await until(lambda: figure(server, "stale_epochs_total", what="report") == 1)
    assert figure(server, "stale_epochs_total", what="placement") == 1
    assert [one.attempt.epoch for one in (await client.describe()).attempts] == [2]


@pytest.mark.parametrize(
    ("lacks", "text"),
    [
        ("worker_id", "needs an id"),
        ("address", "needs an id and an address"),
        ("role", "has no role"),
        ("capacity", "did not send its capacity"),
        ("state", "has no state"),
    ],
)
async def test_invalid_registrations_are_refused(client, lacks, text):
    who, state = identity("w"), pb.WORKER_STATE_READY
    if lacks == "state":
        state = pb.WORKER_STATE_UNSPECIFIED
    else:
        who.ClearField(lacks)
    with pytest.raises(Refused, match=text):
        await client.register(who, state)


async def test_an_encode_worker_needs_no_kv_and_keeps_its_role(server, client):
    encoder = identity("e", pb.ROLE_ENCODE, block_size=0, num_blocks=0)
    await client.register(encoder, pb.WORKER_STATE_READY)
    await add(client, ("d", pb.ROLE_DECODE))
    for worker, role, why in (
        ("e", pb.ROLE_PREFILL, "it has no language model"),
        ("d", pb.ROLE_ENCODE, "it has a language model"),
    ):
        problem = (await client.set_role(worker, role)).problem
        assert problem == f"worker {worker} keeps its role: {why}; `baton encode` starts encode workers"
    assert (await place(client, "r")).decode.worker_id == "d"
    encode = await client.place(need("r/i0", router_id=client.router_id, encode=True))
    assert (encode.decode.worker_id, encode.blocks, encode.prompt_tokens) == ("e", 0, 100)
    assert figure(server, "placements_total", kind="encode") == 1
    assert figure(server, "prefix_placements_total", holds="unknown") == 1
    async with SchedulerClient(server.address, router_id="other", policy=PolicySettings()) as other:
        await other.refresh()
        assert other.standby.fleet.encoders
        alone = other.place_from_snapshot(need("q/i1", router_id="other", encode=True))
        assert (alone.decode.worker_id, alone.decode.role, alone.blocks) == ("e", pb.ROLE_ENCODE, 0)
        assert other.place_from_snapshot(need("q", router_id="other")).decode.worker_id == "d"


async def test_a_heartbeat_without_a_state_is_refused(client):
    with pytest.raises(Refused, match="sent no state"):
        await client.heartbeat("w", pb.WORKER_STATE_UNSPECIFIED, pb.WorkerLoad())


async def test_a_snapshot_has_every_limit(topic):
    """A limit missing from the message would be 0."""
    options = Options(
        topic=topic,
        max_queued_prompt_tokens=11,
        max_queue_factor=1.75,
        handoff_min_tokens=12,
        idle_decode_tokens=13,
        prefix_pull_s=0.25,
    )
    assert all(getattr(options, name) for name in LIMITS)
    async with SchedulerServer(options) as running, aio_channel(running.address, Role.SCHEDULER) as channel:
        snapshot = await rpc.SchedulerStub(channel).Snapshot(pb.SnapshotRequest(), timeout=20)
        assert same_limits(snapshot, options)


async def test_drain_accepts_a_unique_prefix(server, client):
    await add(client, ("decode-1", D), ("decode-12", D), ("prefill-1", P))
    assert "means several workers: decode-1, decode-12" in (await client.drain("dec")).problem
    assert "no worker's id begins with 'x'; there are: decode-1" in (await client.drain("x")).problem
    assert (await client.drain("decode-1")).worker_id == "decode-1"  # an exact match
    assert (await client.drain("pre")).worker_id == "prefill-1"
    states = {one.identity.worker_id: one.state for one in (await client.describe()).workers}
    assert states["decode-1"] == states["prefill-1"] == pb.WORKER_STATE_DRAINING
    assert states["decode-12"] == pb.WORKER_STATE_READY
    assert list((await client.describe()).drained) == ["decode-1", "prefill-1"]
    await until(lambda: figure(server, "workers", role="decode", state="drained") == 1)
    assert (await client.undrain("x")).problem == (
        "'x' is no drained worker's name; drained are: decode-1, prefill-1"
    )
    assert "means several workers; drained are: decode-1, prefill-1" in (await client.undrain("")).problem
    assert (await client.undrain("decode-1")).name == "decode-1"
    assert (await client.undrain("pre")).name == "prefill-1"
    assert "no worker is drained" in (await client.undrain("pre")).problem
    workers = (await client.describe()).workers
    assert {one.state for one in workers} == {pb.WORKER_STATE_READY}


async def test_a_cancelled_request_is_not_placed(server, client):
    await add(client, ("m", M))
    with grpc.insecure_channel(server.address) as channel:
        stub = rpc.SchedulerStub(channel)
        sent = [Sent(need(f"r{number}")) for number in range(20)]
        calls = [stub.Exchange(iter(one)) for one in sent]
        for call in calls:
            assert not (await asyncio.to_thread(next, call)).replies
        for one in sent:
            one.go_on.set()
        time.sleep(0.6)  # noqa: ASYNC251 (the scheduler is busy)
        for call in calls:
            call.cancel()
        time.sleep(0.6)  # noqa: ASYNC251 (still busy)
    await until(lambda: figure(server, "rejections_total", code="deadline") > 0)
    assert not (await client.describe()).attempts
    await place(client, "next")
    assert [one.attempt.request_id for one in (await client.describe()).attempts] == ["next"]


async def test_late_messages_of_a_worker_are_counted(server, client):
    """A restarted worker continues above the last epoch."""
    async with working(client, identity("w")):
        late = identity("w")
        late.epoch = 1
        with pytest.raises(StaleWorker, match="epoch 1 of worker w is late: 2 was seen"):
            await client.register(late, pb.WORKER_STATE_READY)
        assert not (await client.heartbeat("w", pb.WORKER_STATE_READY, pb.WorkerLoad(), 1)).known
        await client.deregister("w", 1)
        assert figure(server, "stale_epochs_total", what="worker") == 3
        assert len((await client.describe()).workers) == 1
        second = WorkerSession(client, identity("w"), pb.WorkerLoad)
        await second.start(30)
        assert (await client.describe()).workers[0].identity.epoch == 3
        await second.close()
    assert not (await client.describe()).workers


async def test_a_snapshot_has_the_bookings_of_other_routers(server, client):
    await add(client, ("p", P), ("d", D))
    await place(client, "mine", 1, 10, 1)

    async def sees(router, wanted):
        async def so():
            await router.refresh()
            return {one.identity.worker_id: one.reserved_requests for one in router.standby.workers} == wanted

        await until(so)

    async with SchedulerClient(server.address, router_id="other") as other:
        await sees(other, {"p": 1, "d": 1})
        await sees(client, {"p": 0, "d": 0})  # nothing of its own
        await client.deregister("d")
        await sees(client, {"p": 0})  # although the scheduler is settling


async def test_a_client_renews_its_placements():
    async with (
        SchedulerServer(Options(placement_lease_s=2.0)) as server,
        SchedulerClient(server.address) as operator,
    ):
        async with SchedulerClient(server.address, router_id="router") as router:
            await add(router, ("m", M))
            await place(router, "held")
            for number in range(3):
                async with SchedulerClient(server.address) as dies:
                    await place(dies, f"left{number}")
            await until_told(operator, lambda told: len(told.attempts) == 1)
            assert [one.attempt.request_id for one in (await operator.describe()).attempts] == ["held"]
            await until(lambda: figure(server, "leases_expired_total") >= 3)
        await until_told(operator, lambda told: not told.attempts)  # its lease has expired


class Slow(SchedulerClient):
    """Delays the first registration's reply, and the second registration."""

    def __init__(self, address):
        super().__init__(address)
        self.registrations = 0
        self.first, self.second = asyncio.Event(), asyncio.Event()

    async def register(self, identity, state, *, scheduler=""):
        self.registrations += 1
        number = self.registrations
        if number == 2:
            await self.second.wait()
        reply = await super().register(identity, state, scheduler=scheduler)
        if number == 1:
            await self.first.wait()
        return reply


async def test_no_worker_is_ready_before_its_capacity_is_known(server):
    """A heartbeat between two registrations must not say ready."""
    one = identity("m")
    one.ClearField("capacity")
    async with Slow(server.address) as client:
        session = WorkerSession(client, one, pb.WorkerLoad)
        starting = asyncio.create_task(session.start(30))
        await until(lambda: client.registrations == 1)
        loaded = asyncio.create_task(session.ready(capacity()))
        await until(lambda: client.registrations == 2)
        client.first.set()
        await starting
        told = (await client.describe()).workers[0]
        assert told.identity.HasField("capacity") or told.state != pb.WORKER_STATE_READY
        client.second.set()
        await loaded
        await session.close()
