"""Routers that choose: by hand, in faults, on full workers, and what they do not know of each other."""

from __future__ import annotations

import asyncio

import pytest

from baton.services.classes import Classes
from baton.services.config import PolicySettings, RouterSettings, SchedulerSettings
from baton.services.router.errors import Why
from baton.services.simulate.booked import Wire
from baton.services.simulate.chosen import Choosing
from baton.services.simulate.deployment import Split
from baton.services.simulate.figures import Run
from baton.services.simulate.loop import VirtualLoop, run
from baton.services.simulate.simulation import Setup, _Simulation, simulate
from baton.services.simulate.traces import Ask, Trace
from baton.services.simulate.worker import Fault
from tests.services.simulate.test_simulation import PAIR, PROFILE, chats, recorded

WIRE = Wire(message_s=0.003, place_s=0.004, look_up_s=0.002)
PREFILLED = 0.11 + 0.06  # 150 tokens: 100, 50
WAYS = {
    "plain": Choosing(),
    "pushed": Choosing(pushed=True),
    "noted": Choosing(noted=True),
    "held": Choosing(desks=2),
    "expecting": Choosing(expects=True),
    "asked": Choosing(asked=2),
    "together": Choosing(asked=2, together=True),
}


def one(trace: Trace, choosing: Choosing | None, split: Split = PAIR, **setup: object) -> Run:
    """Simulate without a warm-up."""
    more = {"wire": WIRE, "choosing": choosing, "warm_share": 0.0, **setup}
    return simulate(Setup(split, PROFILE, **more), trace)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("choosing", "before_s"),
    [
        (None, 0.004 + 0.003),  # a placement and a start
        (Choosing(), 0.002 + 2 * 0.003 + 0.003),  # who holds it, the decode worker's answer, a start
        (Choosing(asked=1), 0.002 + 4 * 0.003 + 0.003),  # and the answers of both
        (Choosing(asked=1, together=True), 0.002 + 2 * 0.003 + 0.003),
    ],
    ids=["booked", "chosen", "asked", "together"],
)
def test_a_request_takes_its_messages_time(choosing: Choosing | None, before_s: float) -> None:
    (outcome,) = one(recorded(Ask(0.0, 150, 5, [7_000 + at for at in range(16)])), choosing).outcomes
    assert outcome.first == pytest.approx(before_s + PREFILLED + 0.005)
    assert outcome.ended == pytest.approx(before_s + PREFILLED + 0.152 + 4 * 0.012 + 0.005)
    assert (outcome.tries, outcome.refused, outcome.computed) == (1, 0, 150)


@pytest.mark.parametrize("choosing", WAYS.values(), ids=WAYS)
def test_every_request_ends_and_nothing_stays_promised(choosing: Choosing) -> None:
    loop = VirtualLoop()
    faults = (Fault(8.0, "prefill-0", 3.0), Fault(13.0, "decode-1", 5.0), Fault(15.0, "decode-0", 8.0, True))
    setup = Setup(Split(2, 2), PROFILE, faults=faults, wire=WIRE, choosing=choosing, routers=3)
    simulation = _Simulation(loop, setup, chats(25.0, per_s=6.0), None)

    async def whole() -> Run:
        found = await simulation.run()
        await asyncio.sleep(1.0)  # the last messages
        return found

    found = run(whole(), loop)
    assert found.lost == 2
    assert [out.problem for out in simulation._outcomes if out.problem] == []
    assert len(simulation._outcomes) > 100
    assert found.fullest <= 1.0
    for worker in simulation._deployment.workers.values():
        assert worker.admission.record.reserved.empty
        assert worker.engine.cache.free == worker.engine.cache.blocks


@pytest.mark.parametrize("choosing", WAYS.values(), ids=WAYS)
def test_the_same_seed_gives_the_same_outcome(choosing: Choosing) -> None:
    runs = [one(chats(), choosing, Split(2, 2), seed=3, routers=2).outcomes for _ in range(2)]
    assert runs[0] == runs[1]


def test_a_request_that_runs_out_of_time_leaves_nothing_promised() -> None:
    loop = VirtualLoop()
    router = RouterSettings(request_timeout_s=0.5)
    setup = Setup(PAIR, PROFILE, router=router, wire=WIRE, choosing=Choosing())
    simulation = _Simulation(loop, setup, recorded(Ask(0.0, 900, 5, [])), None)

    async def whole() -> None:
        await simulation.run()
        await asyncio.sleep(0.2)  # the steps under way

    run(whole(), loop)
    assert [out.problem for out in simulation._outcomes] == ["router.request_timeout_s"]
    assert all(one_.admission.record.reserved.empty for one_ in simulation._deployment.workers.values())


def test_routers_that_do_not_hear_of_each_other_meet_and_those_that_ask_do_not() -> None:
    """Eight routers with a prompt each, a moment apart, for eight prefill workers that were idle."""
    asks = [Ask(0.0, 10, 1, []), *(Ask(1.5 + 0.015 * number, 100, 2, []) for number in range(8))]
    best = SchedulerSettings(idle_decode_tokens=0, policy=PolicySettings(picker="best"))
    ways = {"plain": Choosing(), "asked": Choosing(asked=8), "booked": None}
    slowest = {}
    for name, way in ways.items():
        found = one(recorded(*asks), way, Split(8, 8), scheduler=best, routers=9)
        slowest[name] = max(out.first_s for out in found.outcomes)
    least_s = 0.11 + 0.005 + 0.004 + 0.003
    assert slowest["booked"] == pytest.approx(least_s)
    assert slowest["asked"] < least_s + 0.02
    assert slowest["plain"] > least_s + 0.08  # two of them met


@pytest.mark.parametrize("choosing", WAYS.values(), ids=WAYS)
def test_full_workers_refuse_and_requests_wait(choosing: Choosing) -> None:
    tight = SchedulerSettings(max_queued_prompt_tokens=150, idle_decode_tokens=0)
    asks = [Ask(0.001 * number, 100, 2, []) for number in range(6)]
    found = one(recorded(*asks), choosing, scheduler=tight, routers=3)
    assert [out.problem for out in found.outcomes] == [""] * 6
    assert found.figures()["waited"] >= 4
    assert found.fullest <= 1.0
    assert max(out.first_s for out in found.outcomes) < 6 * 0.11 + 5.0  # what frees a place is heard late


def test_a_scheduler_that_holds_what_it_advises_sends_nobody_away_and_keeps_the_order() -> None:
    tight = SchedulerSettings(max_queued_prompt_tokens=300, idle_decode_tokens=0)
    ways = (Choosing(desks=1, together=True), None)
    longest = []
    for way in ways:
        asks = [Ask(0.03 * number, 60, 2, []) for number in range(200)]  # twice what is computed meanwhile
        found = one(recorded(*asks), way, scheduler=tight, routers=20)
        assert sum(out.refused for out in found.outcomes) == 0
        longest.append(found.figures()["longest_wait_s"])
    # A router that waits asks again after a second. Without turns between routers it is 2.7 s more.
    assert 5.0 < longest[0] < longest[1] + 1.0


@pytest.mark.parametrize("choosing", [None, Choosing(asked=2)], ids=["booked", "asked"])
def test_a_request_is_refused_where_the_queue_is_full(choosing: Choosing | None) -> None:
    tight = SchedulerSettings(max_queued_prompt_tokens=150, idle_decode_tokens=0)
    asks = [Ask(0.05 * number, 800, 2, []) for number in range(4)]
    found = one(recorded(*asks), choosing, scheduler=tight, router=RouterSettings(max_waiting=1))
    assert [out.problem for out in found.outcomes] == ["", "", Why.QUEUE, Why.QUEUE]


def test_a_class_that_goes_first_goes_first_at_the_worker_too() -> None:
    interactive, batch = Classes()
    asks = [Ask(0.001 * number, 100, 2, [], service=batch) for number in range(12)]
    late = Ask(0.02, 100, 2, [], service=interactive)
    found = one(recorded(*asks, late), Choosing(), routers=5)
    order = [out.service for out in sorted(found.outcomes, key=lambda out: out.first)]
    assert order.index("interactive") <= 4  # beside those whose prompts were under way, at most four
