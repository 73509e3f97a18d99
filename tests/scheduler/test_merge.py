"""Merging what another store knows, on each store: what is written back, mirrored and told by routers."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis

from baton.attempts import Attempt
from baton.protos import scheduler_pb2 as pb
from baton.scheduler.errors import StaleWorker
from baton.scheduler.store import Store
from baton.scheduler.store.memory import MemoryStore
from baton.scheduler.store.redis import RedisStore
from baton.scheduler.types import (
    Booking,
    Heard,
    Known,
    Reserved,
    ReserveOutcome,
    RouterReport,
    State,
    WorkerRecord,
)
from harness.scheduling import LEASE_S, RedisServer, claim_on, identity, need, register, report, until

READY = pb.WORKER_STATE_READY


def live(
    request_id: str = "r",
    epoch: int = 1,
    *,
    prefilled: bool = False,
    decode: str = "d",
    lease_s: float = LEASE_S,
) -> Known:
    attempt = Attempt(request_id, epoch)
    return Known(attempt, Booking(attempt, "router", "p", decode, 100, 8), prefilled, lease_s=lease_s)


def over(request_id: str = "r", epoch: int = 1) -> Known:
    return Known(Attempt(request_id, epoch), over=True)


def placed(request_id: str = "r", epoch: int = 1) -> Known:
    return Known(Attempt(request_id, epoch))


def record(worker_id: str, epoch: int = 0, lease_left_s: float = LEASE_S, **changes: Any) -> WorkerRecord:
    return WorkerRecord(
        identity=identity(worker_id, **changes),
        state=READY,
        load=pb.WorkerLoad(running=epoch),
        reserved=Reserved(),
        drain_asked=False,
        lease_left_s=lease_left_s,
        epoch=epoch,
    )


async def pair(store: Store) -> None:
    await register(store, "p", pb.ROLE_PREFILL)
    await register(store, "d", pb.ROLE_DECODE)


async def booked(store: Store) -> dict[str, Reserved]:
    return {key: one.reserved for key, one in (await store.view()).workers.items() if not one.reserved.empty}


async def knows(store: Store) -> dict[Attempt, tuple[bool, bool, bool]]:
    """Attempt -> live, read, over."""
    requests = (await store.export()).requests
    return {one.attempt: (one.booking is not None, one.prefilled, one.over) for one in requests}


async def test_what_runs_elsewhere_is_booked_whatever_the_limits(store: Store) -> None:
    await pair(store)
    for number in range(3):
        await store.merge(State(requests=tuple(live(f"r{one}") for one in range(20))))
        assert await booked(store) == {"p": Reserved(2_000, 20, 0), "d": Reserved(0, 20, 160)}, number
    result = await store.reserve(claim_on(await store.view(), need("new"), "d", "p"), LEASE_S)
    assert result.outcome is ReserveOutcome.FULL
    await store.report(report(finished=[Attempt(f"r{one}", 1) for one in range(20)]), LEASE_S)
    assert await booked(store) == {}


@pytest.mark.parametrize(
    ("first", "second", "known"),
    [
        (live(), live(prefilled=True), {Attempt("r", 1): (True, True, False)}),
        (live(), over(), {Attempt("r", 1): (False, False, True)}),
        (live(), placed(), {Attempt("r", 1): (True, False, False)}),
        (live(), live(epoch=2), {Attempt("r", 2): (True, False, False)}),
        (live(), over(epoch=2), {Attempt("r", 2): (False, False, True)}),
        (live(), placed(epoch=2), {Attempt("r", 2): (False, False, False)}),
        (over(), placed(), {Attempt("r", 1): (False, False, True)}),
        (over(), live(epoch=2), {Attempt("r", 2): (True, False, False)}),
    ],
)
async def test_the_later_wins_whoever_knew_it_first(
    store: Store, first: Known, second: Known, known: dict[Attempt, Any]
) -> None:
    for order in ((first, second), (second, first), (first, second)):
        await store.merge(State(requests=order))
        assert await knows(store) == known
    held = sum(one.requests for one in (await store.booked_by("router")).values())
    alive, read, _ = next(iter(known.values()))
    assert held == (0 if not alive else 1 if read else 2)


async def test_an_expired_lease_is_no_proof_that_it_is_over(store: Store) -> None:
    await pair(store)
    await store.merge(State(requests=(live(lease_s=0.02),)))

    async def swept() -> bool:
        return not (await store.view()).live_attempts

    await until(swept)
    assert await knows(store) == {Attempt("r", 1): (False, False, False)}
    result = await store.report(report(renewed=[Attempt("r", 1)]), LEASE_S)
    assert (result.lost, result.fenced) == ([Attempt("r", 1)], [])
    result = await store.report(RouterReport(placed=(live(prefilled=True),)), LEASE_S)
    assert (result.fenced, result.stale) == ([], 0)
    assert await booked(store) == {"d": Reserved(0, 1, 8, 1)}
    claim = claim_on(await store.view(), need(epoch=1), "d", "p")
    assert (await store.reserve(claim, LEASE_S)).outcome is ReserveOutcome.STALE


async def test_what_is_told_too_late_is_fenced_and_counted(store: Store) -> None:
    await pair(store)
    await store.reserve(claim_on(await store.view(), need(epoch=2), "d", "p"), LEASE_S)
    before = await booked(store)
    result = await store.report(RouterReport(placed=(live(epoch=1),)), LEASE_S)
    assert (result.fenced, result.stale) == ([Attempt("r", 1)], 1)
    assert await booked(store) == before
    await store.report(report(finished=[Attempt("r", 2)]), LEASE_S)
    result = await store.report(RouterReport(placed=(live(epoch=2),)), LEASE_S)
    assert (result.fenced, result.stale) == ([Attempt("r", 2)], 0)
    result = await store.report(report(renewed=[Attempt("r", 2)]), LEASE_S)
    assert (result.lost, result.fenced) == ([], [Attempt("r", 2)])
    assert await booked(store) == {}


async def test_workers_are_taken_over_with_their_leases(store: Store) -> None:
    await store.merge(State(workers=(record("a", 3), record("b", 1, 0.02))))

    async def only_a() -> bool:
        return set((await store.view()).workers) == {"a"}

    await until(only_a)
    worker = (await store.view()).workers["a"]
    assert (worker.identity, worker.load) == (identity("a"), pb.WorkerLoad(running=3))
    await store.merge(State(workers=(record("a", 2, 2 * LEASE_S),)))  # an older one
    assert (await store.view()).workers["a"].load == pb.WorkerLoad(running=3)
    stranger = record("x")
    stranger.identity.model = "another"
    await store.merge(State(workers=(stranger,)))
    assert set((await store.view()).workers) == {"a"}
    assert await store.register(identity("c"), READY, LEASE_S) == ""
    assert await store.heartbeat("a", READY, pb.WorkerLoad(), LEASE_S, 3) == Heard(True, False)


@pytest.mark.parametrize("theirs", range(4))
@pytest.mark.parametrize("ours", range(4))
async def test_whoever_drained_or_undid_it_last_is_believed(store: Store, ours: int, theirs: int) -> None:
    """The one who saw the other's word, that is; a count that is even is a drain undone."""
    for turn in range(ours):
        await store.drain("w", undo=bool(turn % 2))
    for _ in range(2):
        await store.merge(State(drains={"w": theirs, "x": 1}))
        assert (await store.export()).drains.get("w", 0) == max(ours, theirs)
        drained = {"x", "w"} if max(ours, theirs) % 2 else {"x"}
        assert (await store.view()).drained == drained


async def test_a_workers_late_messages_are_refused(store: Store) -> None:
    first, second = identity("w"), identity("w")
    first.epoch, second.epoch = 1, 2
    assert await store.register(second, READY, LEASE_S) == ""
    with pytest.raises(StaleWorker) as caught:
        await store.register(first, pb.WORKER_STATE_STARTING, LEASE_S)
    assert caught.value.last == 2
    stale = Heard(known=False, drain=False, stale=True)
    assert await store.heartbeat("w", pb.WORKER_STATE_DRAINING, pb.WorkerLoad(), LEASE_S, 1) == stale
    assert not await store.deregister("w", 1)
    assert (await store.view()).workers["w"].placeable
    draining = pb.WORKER_STATE_DRAINING
    assert (await store.heartbeat("w", draining, pb.WorkerLoad(), LEASE_S, 3)).known
    assert (
        await store.heartbeat("w", READY, pb.WorkerLoad(), LEASE_S, 2) == stale
    )  # it would be placed on again
    assert await store.deregister("w", 4)
    with pytest.raises(StaleWorker):
        await store.register(second, READY, LEASE_S)
    assert not (await store.view()).workers
    again = identity("w")
    again.epoch = 5
    assert await store.register(again, READY, LEASE_S) == ""


async def test_a_generation_stays_until_all_is_lost(own_redis: RedisServer) -> None:
    one, other = RedisStore(own_redis.url, "t"), RedisStore(own_redis.url, "t")
    first = await one.merge(State())
    assert first
    assert await other.merge(State(generation="mine")) == first
    assert (await one.export()).generation == first
    admin = Redis.from_url(own_redis.url)
    await admin.flushall()
    await admin.aclose()
    assert (await one.export()).generation == ""
    second = await one.merge(State())
    assert second not in ("", first)
    for store in (one, other):
        await store.close()


async def test_large_states_go_in_pieces(redis_server: RedisServer, topic: str) -> None:
    store, memory = RedisStore(redis_server.url, topic), MemoryStore(topic)
    workers = tuple(record(f"w{number}") for number in range(3))
    requests = tuple(live(f"r{number}", decode=f"w{number % 3}") for number in range(1_500))
    await memory.merge(State(workers=workers, requests=requests))
    await store.merge(await memory.export())
    assert await booked(store) == await booked(memory)
    assert len(await knows(store)) == 1_500
    await store.close()


WHO = st.sampled_from(["a", "b"])
FACTS = st.builds(
    lambda who, epoch, stage: {
        "live": live(who, epoch, decode=f"d{epoch}"),
        "read": live(who, epoch, decode=f"d{epoch}", prefilled=True),
        "over": over(who, epoch),
        "placed": placed(who, epoch),
    }[stage],
    WHO,
    st.integers(1, 3),
    st.sampled_from(["live", "read", "over", "placed"]),
)


@pytest.fixture(params=["memory", "redis"])
def url(request: pytest.FixtureRequest) -> str:
    return "" if request.param == "memory" else str(request.getfixturevalue("redis_server").url)


@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(facts=st.lists(FACTS, min_size=2, max_size=6), data=st.data())
def test_the_order_of_merges_does_not_matter(url: str, facts: list[Known], data: st.DataObject) -> None:
    shuffled = data.draw(st.permutations(facts))

    async def outcome(order: list[Known]) -> tuple[Any, Any]:
        topic = uuid.uuid4().hex
        store: Store = RedisStore(url, topic) if url else MemoryStore(topic)
        try:
            for fact in order:
                await store.merge(State(requests=(fact,)))
            return await knows(store), await store.booked_by("router")
        finally:
            await store.close()

    assert asyncio.run(outcome(facts)) == asyncio.run(outcome(list(shuffled)))
