"""The memory store's clock, which a test may turn; times of all stores are covered by `test_store.py`."""

from __future__ import annotations

import time

import pytest

from baton.attempts import EPOCH_KEEP_S, Attempt
from baton.protos import scheduler_pb2 as pb
from baton.scheduler.store.ledger import Ledger
from baton.scheduler.store.memory import MemoryStore
from baton.scheduler.types import Heard, Known, ReserveOutcome
from harness.scheduling import claim_on, identity, need, register, report


class Clock:
    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def turned(clock: Clock) -> MemoryStore:
    return MemoryStore("t", clock)


async def test_leases_end_when_they_should(turned: MemoryStore, clock: Clock) -> None:
    await turned.register(identity("m"), pb.WORKER_STATE_READY, 5.0)
    await turned.reserve(claim_on(await turned.view(), need(), "m"), 3.0)
    clock.now += 2.999
    view = await turned.view()
    assert (view.live_attempts, view.expired) == (1, 0)
    assert view.workers["m"].lease_left_s == pytest.approx(2.001)
    assert (await turned.history(1)).attempts[0].lease_left_s == pytest.approx(0.001)
    clock.now += 0.001
    view = await turned.view()
    assert (view.live_attempts, view.expired) == (0, 1)
    clock.now += 2.0
    assert await turned.heartbeat("m", pb.WORKER_STATE_READY, pb.WorkerLoad(), 5.0) == Heard(False, False)
    assert not (await turned.view()).workers


async def test_epochs_are_remembered_for_their_time_and_no_longer(turned: MemoryStore, clock: Clock) -> None:
    await register(turned, "m")
    claim = claim_on(await turned.view(), need(), "m")
    await turned.reserve(claim, 1e6)
    await turned.report(report(finished=[Attempt("r", 1)]), 1.0)
    await turned.register(identity("m"), pb.WORKER_STATE_READY, 1e6)
    clock.now += EPOCH_KEEP_S - 0.001
    assert (await turned.reserve(claim, 1.0)).outcome is ReserveOutcome.STALE
    clock.now += 0.001
    assert (await turned.reserve(claim, 1.0)).outcome is ReserveOutcome.BOOKED


async def test_an_epoch_is_not_forgotten_while_a_later_attempt_lives(
    turned: MemoryStore, clock: Clock
) -> None:
    await turned.register(identity("m"), pb.WORKER_STATE_READY, 1e6)
    view = await turned.view()
    await turned.reserve(claim_on(view, need(epoch=1), "m"), 1e6)
    await turned.report(report(finished=[Attempt("r", 1)]), 1.0)
    await turned.reserve(claim_on(view, need(epoch=2), "m"), 1e6)
    clock.now += 10 * EPOCH_KEEP_S
    assert (await turned.reserve(claim_on(view, need(epoch=2), "m"), 1e6)).outcome is ReserveOutcome.STALE


def test_forgetting_takes_as_long_however_many_were_forgotten_before() -> None:
    """Where requests come and go all the time: a plain dict passes over all that were deleted before."""

    def seconds_each(kept: int) -> float:
        ledger = Ledger()
        took = 0.0
        for number in range(kept + 10_000):
            now = number * EPOCH_KEEP_S / kept
            began = time.thread_time()
            ledger.conclude(Known(Attempt(f"{number}", 1), over=True), now)
            ledger.sweep(now)
            took += (time.thread_time() - began) * (number >= kept)
        assert len(list(ledger.export(now))) in (kept, kept + 1)
        return took / 10_000

    few, many = (min(seconds_each(kept) for _ in range(2)) for kept in (100, 50_000))
    assert many < 2 * few  # three times with a dict
