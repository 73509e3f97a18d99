"""Choosing and booking together, also by several schedulers at once."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Mapping

import pytest

from baton.attempts import Attempt
from baton.protos import scheduler_pb2 as pb
from baton.scheduler.booking import Assignment
from baton.scheduler.placer import Placer
from baton.scheduler.policy import NoChoice, Policy
from baton.scheduler.store import Store
from baton.scheduler.store.redis import RedisStore
from baton.scheduler.types import (
    Claim,
    FleetView,
    PlacementLimits,
    ReportResult,
    Reserved,
    ReserveResult,
    RouterReport,
    State,
    Told,
)
from harness.scheduling import LEASE_S, LIMITS, Options, RedisServer, need, register, report, until


class Counting(Store):
    """A real store whose round trips are counted; `before_reserve` may act between choosing and booking."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self.name = inner.name
        self.views = 0
        self.reserves = 0
        self.before_reserve: list[Claim] = []

    async def view(self) -> FleetView:
        self.views += 1
        return await self.inner.view()

    async def reserve(self, claim: Claim, lease_s: float) -> ReserveResult:
        self.reserves += 1
        if self.before_reserve:
            await self.inner.reserve(self.before_reserve.pop(), lease_s)
        return await self.inner.reserve(claim, lease_s)

    async def report(self, what: RouterReport, lease_s: float) -> ReportResult:
        return await self.inner.report(what, lease_s)

    async def register(self, identity: pb.WorkerIdentity, state: pb.WorkerState, lease_s: float) -> str:
        return await self.inner.register(identity, state, lease_s)

    async def heartbeat(self, worker_id, state, load, lease_s, epoch=0):  # type: ignore[no-untyped-def]
        return await self.inner.heartbeat(worker_id, state, load, lease_s, epoch)

    async def deregister(self, worker_id: str, epoch: int = 0) -> bool:
        return await self.inner.deregister(worker_id, epoch)

    async def drain(self, name: str, *, undo: bool = False) -> bool:
        return await self.inner.drain(name, undo=undo)

    async def take_turn(self, what: str, for_s: float) -> bool:
        return await self.inner.take_turn(what, for_s)

    async def tell(self, kind: str, who: str, message: bytes, lease_s: float) -> bytes:
        return await self.inner.tell(kind, who, message, lease_s)

    async def lead(self, who: str, for_s: float) -> int:
        return await self.inner.lead(who, for_s)

    async def told(self) -> Told:
        return await self.inner.told()

    async def order(self, fence: int, orders: Mapping[str, bytes]) -> bool:
        return await self.inner.order(fence, orders)

    async def history(self, limit):  # type: ignore[no-untyped-def]
        return await self.inner.history(limit)

    async def export(self, since: int = 0) -> State:
        return await self.inner.export(since)

    async def merge(self, state: State) -> str:
        return await self.inner.merge(state)

    async def close(self) -> None:
        await self.inner.close()


def placer(store: Store, limits: PlacementLimits = LIMITS, lease_s: float = LEASE_S, seed: int = 1) -> Placer:
    return Placer(store, Policy(limits, LIMITS.policy, random.Random(seed)), limits, lease_s, lambda _: None)


@pytest.fixture
async def counted(store: Store) -> Counting:
    counting = Counting(store)
    await register(counting, "p", pb.ROLE_PREFILL)
    await register(counting, "d", pb.ROLE_DECODE, max_num_seqs=50, num_blocks=10_000)
    return counting


async def test_placing_costs_one_view_and_one_booking(counted: Counting) -> None:
    placed = await placer(counted).place(need())
    assert isinstance(placed, Assignment)
    assert placed.prefill is not None
    assert (placed.prefill.worker_id, placed.decode.worker_id) == ("p", "d")
    assert (counted.views, counted.reserves) == (1, 1)


async def test_many_at_once_share_a_view(counted: Counting) -> None:
    one = placer(counted)
    began = time.monotonic()
    placed = await asyncio.gather(*(one.place(need(f"r{number}", prompt=1)) for number in range(50)))
    took = time.monotonic() - began
    assert all(isinstance(outcome, Assignment) for outcome in placed)
    assert counted.reserves == 50
    assert counted.views <= 1 + took / 0.02


async def test_a_view_ages_by_the_clock_that_is_given(counted: Counting) -> None:
    now = 0.0
    policy = Policy(LIMITS, LIMITS.policy, random.Random(1))
    one = Placer(counted, policy, LIMITS, LEASE_S, lambda _: None, clock=lambda: now)
    for number, (now, views) in enumerate([(0.0, 1), (0.019, 1), (0.041, 2), (0.041, 2)]):  # noqa: B007
        assert isinstance(await one.place(need(f"r{number}", prompt=1)), Assignment)
        assert counted.views == views


async def test_own_bookings_count_in_an_old_view(store: Store) -> None:
    await register(store, "a")
    await register(store, "b")
    one = placer(store)
    outcomes = [await one.place(need(f"r{number}", prompt=1)) for number in range(8)]
    names = [outcome.decode.worker_id for outcome in outcomes if isinstance(outcome, Assignment)]
    assert (names.count("a"), names.count("b")) == (4, 4)  # of two, the less loaded one each time


async def test_bookings_that_are_under_way_count_too(store: Store) -> None:
    await register(store, "a")
    await register(store, "b")
    one = placer(store)
    outcomes = await asyncio.gather(*(one.place(need(f"r{number}", prompt=1)) for number in range(8)))
    names = [outcome.decode.worker_id for outcome in outcomes if isinstance(outcome, Assignment)]
    assert (names.count("a"), names.count("b")) == (4, 4)


async def test_a_booking_that_was_given_up_counts_no_more(store: Store) -> None:
    class Held(Counting):
        async def reserve(self, *_: object) -> ReserveResult:
            reserving.set()
            await asyncio.Event().wait()
            raise AssertionError

    await register(store, "a")
    one, reserving = placer(Held(store)), asyncio.Event()
    placing = asyncio.create_task(one.place(need("r", prompt=1)))
    await asyncio.wait_for(reserving.wait(), 5)
    view = await one.view(0.0)
    assert view.workers["a"].reserved.requests == 1
    placing.cancel()
    await asyncio.wait({placing})
    assert view.workers["a"].reserved.requests == 0


async def test_a_booking_that_was_refused_counts_no_more(store: Store) -> None:
    await register(store, "a")
    one = placer(store)
    assert isinstance(await one.place(need("r", prompt=1)), Assignment)
    refused = await one.place(need("r", prompt=1))
    assert isinstance(refused, NoChoice)
    assert refused.code == pb.Rejection.CODE_STALE_EPOCH
    assert (await one.view(0.0)).workers["a"].reserved.requests == 1


async def test_a_faster_one_makes_us_choose_again(store: Store) -> None:
    counting = Counting(store)
    await register(counting, "a", max_num_seqs=1)
    await register(counting, "b", max_num_seqs=1)
    one = placer(counting)
    limits = Options(max_queue_factor=1.0, idle_decode_tokens=0)
    one = placer(counting, limits)
    view = await counting.view()
    chosen = Policy(limits, LIMITS.policy, random.Random(1)).choose(view, need("mine", prompt=1))
    from baton.scheduler.booking import claim

    counting.before_reserve = [claim(need("theirs", prompt=1), chosen.prefill, chosen.decode, limits)]  # type: ignore[union-attr]
    placed = await one.place(need("mine", prompt=1))
    assert isinstance(placed, Assignment)
    assert placed.decode.worker_id != chosen.decode.worker_id  # type: ignore[union-attr]
    assert counting.reserves == 2


async def test_a_rejection_is_decided_on_a_fresh_view(counted: Counting) -> None:
    one = placer(counted)
    await one.place(need("big", prompt=900))
    await counted.report(report(prefilled=[Attempt("big", 1)]), LEASE_S)
    assert isinstance(await one.place(need("next", prompt=900)), Assignment)  # the old view says: no room
    outcome = await one.place(need("too-many", prompt=900))
    assert isinstance(outcome, NoChoice)
    assert outcome.code == pb.Rejection.CODE_FULL


async def test_a_worker_that_left_is_not_chosen_again(counted: Counting) -> None:
    one = placer(counted)
    assert isinstance(await one.place(need("a", prompt=1)), Assignment)
    await register(counted, "d2", pb.ROLE_DECODE)
    await counted.deregister("d")
    placed = await one.place(need("b", prompt=1))  # the old view still has d, and not d2
    assert isinstance(placed, Assignment)
    assert placed.decode.worker_id == "d2"


async def test_a_stale_epoch_is_said(counted: Counting) -> None:
    one = placer(counted)
    await one.place(need(epoch=2))
    outcome = await one.place(need(epoch=2))
    assert isinstance(outcome, NoChoice)
    assert outcome.code == pb.Rejection.CODE_STALE_EPOCH
    assert outcome.message == "epoch 2 of request r is not above 2, placed before"


async def test_expired_leases_are_told(store: Store) -> None:
    await register(store, "m")
    told: list[int] = []
    one = Placer(store, Policy(LIMITS, LIMITS.policy), LIMITS, 0.02, told.append)
    await one.place(need())

    async def swept() -> bool:
        await one.view(time.monotonic())
        return bool(told)

    await until(swept)
    assert told == [1]


@pytest.fixture
async def replicas(redis_server: RedisServer, topic: str) -> AsyncIterator[list[Store]]:
    stores: list[Store] = [RedisStore(redis_server.url, topic) for _ in range(3)]
    yield stores
    for one in stores:
        await one.close()


async def test_replicas_placing_at_once_never_pass_a_limit(replicas: list[Store]) -> None:
    """300 placements by three schedulers, room for 2 x 8: exactly 16 get in, and all come out again."""
    for name in ("d1", "d2"):
        await register(replicas[0], name, pb.ROLE_DECODE)
    for name in ("p1", "p2", "p3"):
        await register(replicas[0], name, pb.ROLE_PREFILL)
    placers = [placer(store, seed=number) for number, store in enumerate(replicas)]
    outcomes = await asyncio.gather(
        *(placers[number % 3].place(need(f"r{number}", prompt=50, new=10)) for number in range(300))
    )
    placed = [outcome for outcome in outcomes if isinstance(outcome, Assignment)]
    assert len(placed) == 16
    codes = {outcome.code for outcome in outcomes if isinstance(outcome, NoChoice)}
    assert codes == {pb.Rejection.CODE_FULL}
    view = await replicas[2].view()
    assert [view.workers[name].reserved.requests for name in ("d1", "d2")] == [8, 8]
    assert sum(view.workers[name].reserved.prompt_tokens for name in ("p1", "p2", "p3")) == 16 * 50
    live = await replicas[1].history(100)
    await replicas[0].report(
        report(finished=[Attempt(one.attempt.request_id, 1) for one in live.attempts]), LEASE_S
    )
    view = await replicas[1].view()
    assert all(worker.reserved == Reserved() for worker in view.workers.values())


async def test_replicas_place_one_epoch_once(replicas: list[Store]) -> None:
    await register(replicas[0], "m")
    placers = [placer(store) for store in replicas]
    outcomes = await asyncio.gather(*(one.place(need("r", 1, 10)) for one in placers * 3))
    assert sum(isinstance(outcome, Assignment) for outcome in outcomes) == 1
    stale = [outcome.code for outcome in outcomes if isinstance(outcome, NoChoice)]
    assert stale == [pb.Rejection.CODE_STALE_EPOCH] * 8
