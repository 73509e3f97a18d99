"""One run of a plan: start the deployment, drive the load, break and mend, and check what is left."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from harness.chaos import placing
from harness.chaos.answers import questions
from harness.chaos.faults import FAULTS, Act
from harness.chaos.load import Load
from harness.chaos.outcome import ADDED_S, Leaks, Outcome, Span, leaks
from harness.chaos.placed import Left, Placed
from harness.chaos.placing import Placing
from harness.chaos.plans import Event, Plan
from harness.chaos.poisoners import poisoners
from harness.chaos.site import LOOK_S, Site
from harness.chaos.supervised import SupervisedSite

HEAL_S = 60.0  # after a repair, until all is whole again
FAULT_S = 150.0  # one fault, its drains included
IDLE_S = 20.0  # before the load begins
CLEAN_S = 3.0  # after placements: less than a lease, as no router died that would need one
TROUBLE = 'trouble="'
RECOMPUTED = "baton_router_recomputed_prompts_total"

Say = Callable[[str], None]


def _nothing(site: Site) -> None:
    """Do nothing."""


async def run(
    plan: Plan, seed: int, seconds: float, folder: Path, say: Say, serves: Callable[[Site], None] = _nothing
) -> Outcome | Placed:
    """Break a deployment made for this run. Its problems are part of the outcome.

    serves: called, in a thread, once the deployment serves, before the load begins.
    """
    site = (SupervisedSite if plan.shape.supervised else Site)(plan.shape, folder)
    if plan.rate:
        return await _place(site, plan, seed, seconds, say)
    return await _ask(site, plan, seed, seconds, say, serves)


async def _ask(
    site: Site, plan: Plan, seed: int, seconds: float, say: Say, serves: Callable[[Site], None]
) -> Outcome:
    shape = plan.shape
    outcome = Outcome(
        plan.name,
        seed,
        shape.name,
        str((shape.speculation or {}).get("mtp_strategy") or (shape.speculation or {}).get("method", "none")),
        "redis" if shape.redis else "memory",
        # A request waits for the trials of all that were in a failed step with it: as long as they take.
        pause_limit_s=0.0 if plan.poison else shape.lease_s + ADDED_S,
        full=plan.clients > shape.slots * (shape.decode + shape.mixed),
    )
    try:
        await _with_requests(site, plan, seed, seconds, outcome, say, serves)
    except AssertionError as problem:
        outcome.unhealed.append(f"the plan ended early: {problem}")
    outcome.leaks.segments = len(site.segments_left())
    outcome.restarts = site.restarts.total()
    outcome.crashes = site.crashes
    return outcome


async def _place(site: Site, plan: Plan, seed: int, seconds: float, say: Say) -> Placed:
    outcome = Placed(plan.name, seed, plan.rate, placing.WORKERS, placing.ROUTERS, plan.shape.schedulers)
    try:
        await _placed(site, plan, seed, seconds, outcome, say)
    except AssertionError as problem:
        outcome.unhealed.append(f"the plan ended early: {problem}")
    outcome.restarts = site.restarts.total()
    outcome.crashes = site.crashes
    return outcome


async def _with_requests(
    site: Site,
    plan: Plan,
    seed: int,
    seconds: float,
    outcome: Outcome,
    say: Say,
    serves: Callable[[Site], None],
) -> None:
    """Run a plan with requests. Raises AssertionError if the deployment does not start or end well."""
    shape = site.shape
    async with site:
        say(f"{plan.name}: {shape.name} serves")
        await asyncio.to_thread(serves, site)
        known = await questions(site.url(site.routers[0]), plan.every)
        await _idle(site)
        async with (
            Load(site, known, plan.clients, f"{seed} {plan.name}", long=plan.long) as load,
            poisoners(site, plan.poison, f"{seed} {plan.name}") as poison,
        ):
            broken = await _break(site, plan, seed, seconds, load, outcome, say)
        outcome.poison, outcome.engines_failed = dict(poison.answers), site.engines_failed
        outcome.unmet += poison.judge()
        outcome.stages = dict(broken.census)
        ended = time.monotonic()
        expected = [load.expected(answer) for answer in load.over]
        outcome.add(load.over, expected, site.uncovered_until(ended), broken.struck)
        outcome.leaks = await _left(site, ended + 2 * shape.lease_limit_s)
        outcome.clean_after_s = time.monotonic() - ended
        await site.keep_records()
        metrics = await site.metrics()
        outcome.retries = _retries(metrics)
        outcome.recomputed = int(metrics.get(RECOMPUTED, 0))
        outcome.most_booked = site.most_booked
        outcome.meet(plan.least, plan.most)


async def _placed(site: Site, plan: Plan, seed: int, seconds: float, outcome: Placed, say: Say) -> None:
    """Run a placing plan. Raises AssertionError when the schedulers do not start."""
    async with site, placing.registered(site):
        say(f"{plan.name}: {outcome.schedulers} schedulers know {outcome.workers} workers")
        async with Placing(site, outcome, f"{seed} {plan.name}") as load:
            broken = await _break(site, plan, seed, seconds, load, outcome, say)
        ended = time.monotonic()
        outcome.add(load.over, broken.spans)
        deadline = ended + CLEAN_S
        while (left := Left.of(await site.describe_each())).any and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(LOOK_S)
        outcome.left, outcome.clean_after_s = left, time.monotonic() - ended


@dataclass
class _Broken:
    """The faults that were done."""

    census: Counter[str] = field(default_factory=Counter)
    spans: list[Span] = field(default_factory=list)  # of the faults, each until all was whole again
    struck: list[float] = field(default_factory=list)  # when each did its harm: within its span


async def _break(
    site: Site,
    plan: Plan,
    seed: int,
    seconds: float,
    load: Load | Placing,
    outcome: Outcome | Placed,
    say: Say,
) -> _Broken:
    """Do one fault after the other, for so many seconds."""
    broken = _Broken()
    began = outcome.began_at = time.monotonic()
    faults: Counter[str] = Counter()
    for event in plan.events(seed):
        if time.monotonic() - began >= seconds:
            break
        await asyncio.sleep(event.gap_s)
        since = time.monotonic()
        act = await _happen(event, site, load, outcome, say)
        broken.census += act.census
        broken.struck.append(act.struck or since)
        broken.spans.append((since, time.monotonic()))
        faults[event.fault] += 1
    if not plan.faults:
        await asyncio.sleep(seconds)
    outcome.seconds, outcome.faults = time.monotonic() - began, dict(faults)
    return broken


async def _happen(event: Event, site: Site, load: Load | Placing, outcome: Outcome | Placed, say: Say) -> Act:
    """Do one fault, and wait until all is whole again."""
    answers = load if isinstance(load, Load) else None
    act = Act(site, answers, random.Random(event.draw), event.stage, event.hold_s)
    began = time.monotonic()
    try:
        async with asyncio.timeout(FAULT_S):
            await FAULTS[event.fault].run(act)
        repaired = time.monotonic()
        await site.whole(HEAL_S)
    except (AssertionError, TimeoutError) as problem:
        why = str(problem) or "it took too long"
        outcome.unhealed.append(f"{event.number}. {event.fault} ({event.stage}): {why}")
        say(f"  {outcome.unhealed[-1]}")
        await site.mend()
        return act
    now = time.monotonic()
    say(
        f"  {event.number:3}. {began - outcome.began_at:5.1f} s: {event.fault:24} {event.stage:7} "
        f"{repaired - began:5.1f} s, whole after "
        f"{now - repaired:4.1f} s; {load.progress}"
    )
    return act


async def _idle(site: Site) -> None:
    """Wait until nothing is held. AssertionError when that does not come true."""
    found = await _left(site, time.monotonic() + IDLE_S)
    if found.any:
        raise AssertionError(f"the deployment does not become idle within {IDLE_S:g} s: {found}")


async def _left(site: Site, deadline: float) -> Leaks:
    """Return what is held at the deadline (time.monotonic), or nothing as soon as nothing is."""
    found = Leaks()
    while True:
        description = await site.describe()
        if description is not None:
            found = leaks(description)
            if not found.any:
                return found
        if time.monotonic() > deadline:
            if description is None:
                raise AssertionError("no scheduler answers at the end")
            return found
        await asyncio.sleep(LOOK_S)


def _retries(metrics: dict[str, float]) -> dict[str, int]:
    found: Counter[str] = Counter()
    for name, value in metrics.items():
        if name.startswith("baton_router_retries_total{"):
            found[name.partition(TROUBLE)[2].partition('"')[0]] += int(value)
    return dict(found)
