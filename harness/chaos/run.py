"""Run a plan: start the deployment, send the load, break and repair parts, and look for leaks."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from harness.chaos import placing
from harness.chaos.faults import FAULTS, Act
from harness.chaos.load import Load
from harness.chaos.outcome import ADDED_S, Leaks, Outcome, Span, leaks
from harness.chaos.placing import Placing
from harness.chaos.placing_judge import Left, Placed
from harness.chaos.plans import Event, Plan
from harness.chaos.poisoners import poisoners
from harness.chaos.questions import questions
from harness.chaos.site import LOOK_S, Site
from harness.chaos.supervised import SupervisedSite

HEAL_S = 60.0  # timeout for the site to be whole after a repair
FAULT_S = 150.0  # timeout of a fault, including drains
IDLE_S = 20.0  # timeout for the deployment to be idle before the load
CLEAN_S = 3.0  # timeout for nothing to be left after placements; less than a lease, because no router died
RETRIES = 'baton_router_retries_total{trouble="'
RECOMPUTED = "baton_router_recomputed_prompts_total"

Say = Callable[[str], None]


async def run(
    plan: Plan,
    seed: int,
    seconds: float,
    folder: Path,
    say: Say,
    serves: Callable[[Site], None] = lambda _: None,
) -> Outcome | Placed:
    """Run a plan on a new deployment. Problems are part of the outcome.

    `serves` is called in a thread when the deployment serves, before the load begins.
    """
    site = (SupervisedSite if plan.shape.supervised else Site)(plan.shape, folder)
    outcome = _placed(plan, seed) if plan.rate else _outcome(plan, seed)
    one = _Run(site, plan, seed, seconds, outcome, say)
    try:
        if isinstance(outcome, Placed):
            await one.place(outcome)
        else:
            await one.ask(outcome, serves)
    except AssertionError as problem:
        outcome.unhealed.append(f"the plan ended early: {problem}")
    if isinstance(outcome, Outcome):
        outcome.leaks.segments = len(site.segments_left())
    outcome.restarts, outcome.crashes = site.restarts.total(), site.crashes
    return outcome


def _outcome(plan: Plan, seed: int) -> Outcome:
    shape, speculation = plan.shape, plan.shape.speculation or {}
    return Outcome(
        plan.name,
        seed,
        shape.name,
        str(speculation.get("mtp_strategy") or speculation.get("method", "none")),
        "redis" if shape.redis else "memory",
        # A poisoned step's requests are tried alone, one after another, so other requests wait longer.
        pause_limit_s=0.0 if plan.poison else shape.lease_s + ADDED_S,
        full=plan.clients > shape.slots * (shape.decode + shape.mixed),
    )


def _placed(plan: Plan, seed: int) -> Placed:
    return Placed(plan.name, seed, plan.rate, placing.WORKERS, placing.ROUTERS, plan.shape.schedulers)


@dataclass
class _Run:
    site: Site
    plan: Plan
    seed: int
    seconds: float
    outcome: Outcome | Placed
    say: Say
    census: Counter[str] = field(default_factory=Counter)
    spans: list[Span] = field(default_factory=list)  # each lasts from a fault until the site is whole again
    struck: list[float] = field(default_factory=list)  # when each fault struck

    async def ask(self, outcome: Outcome, serves: Callable[[Site], None]) -> None:
        """Run a plan with requests. Raises AssertionError if the deployment does not start or become idle."""
        site, plan, seed = self.site, self.plan, f"{self.seed} {self.plan.name}"
        async with site:
            self.say(f"{plan.name}: {site.shape.name} serves")
            await asyncio.to_thread(serves, site)
            url, images = site.url(site.routers[0]), bool(site.shape.encode)
            known = await questions(url, plan.every, site.engine["model"], images=images)
            if (found := await self._left(time.monotonic() + IDLE_S)).any:
                raise AssertionError(f"the deployment does not become idle within {IDLE_S:g} s: {found}")
            async with (
                Load(site, known, plan.clients, seed, long=plan.long) as load,
                poisoners(site, plan.poison, seed) as poison,
            ):
                await self._break(load)
            outcome.poison, outcome.engines_failed = dict(poison.answers), site.engines_failed
            outcome.unmet += poison.judge()
            outcome.stages = dict(self.census)
            ended = time.monotonic()
            expected = [load.expected(answer) for answer in load.over]
            outcome.add(load.over, expected, site.uncovered_until(ended), self.struck)
            outcome.leaks = await self._left(ended + 2 * site.shape.lease_limit_s)
            outcome.clean_after_s = time.monotonic() - ended
            await site.keep_records()
            metrics = await site.metrics()
            retries: Counter[str] = Counter()
            for name, value in metrics.items():
                if name.startswith(RETRIES):
                    retries[name.removeprefix(RETRIES).partition('"')[0]] += int(value)
            outcome.retries, outcome.recomputed = dict(retries), int(metrics.get(RECOMPUTED, 0))
            outcome.most_booked = site.most_booked
            outcome.meet(plan.least, plan.most)

    async def place(self, outcome: Placed) -> None:
        """Run a placing plan. Raises AssertionError if the schedulers do not start."""
        site, plan = self.site, self.plan
        async with site, placing.registered(site):
            self.say(f"{plan.name}: {outcome.schedulers} schedulers know {outcome.workers} workers")
            async with Placing(site, outcome, f"{self.seed} {plan.name}") as load:
                await self._break(load)
            ended = time.monotonic()
            outcome.add(load.over, self.spans)
            deadline = ended + CLEAN_S
            while (left := Left.of(await site.describe_each())).any and time.monotonic() < deadline:  # noqa: ASYNC110
                await asyncio.sleep(LOOK_S)
            outcome.left, outcome.clean_after_s = left, time.monotonic() - ended

    async def _break(self, load: Load | Placing) -> None:
        """Run faults one at a time until the plan's time is up."""
        began = self.outcome.began_at = time.monotonic()
        faults: Counter[str] = Counter()
        for event in self.plan.events(self.seed):
            if time.monotonic() - began >= self.seconds:
                break
            await asyncio.sleep(event.gap_s)
            since = time.monotonic()
            act = await self._happen(event, load)
            self.census += act.census
            self.struck.append(act.struck or since)
            self.spans.append((since, time.monotonic()))
            faults[event.fault] += 1
        if not self.plan.faults:
            await asyncio.sleep(self.seconds)
        self.outcome.seconds, self.outcome.faults = time.monotonic() - began, dict(faults)

    async def _happen(self, event: Event, load: Load | Placing) -> Act:
        answers = load if isinstance(load, Load) else None
        act = Act(self.site, answers, random.Random(event.draw), event.stage, event.hold_s)
        began = time.monotonic()
        try:
            async with asyncio.timeout(FAULT_S):
                await FAULTS[event.fault].run(act)
            repaired = time.monotonic()
            await self.site.whole(HEAL_S)
        except (AssertionError, TimeoutError) as problem:
            why = str(problem) or "it took too long"
            self.outcome.unhealed.append(f"{event.number}. {event.fault} ({event.stage}): {why}")
            self.say(f"  {self.outcome.unhealed[-1]}")
            await self.site.mend()
            return act
        self.say(
            f"  {event.number:3}. {began - self.outcome.began_at:5.1f} s: {event.fault:24} {event.stage:7} "
            f"{repaired - began:5.1f} s, whole after {time.monotonic() - repaired:4.1f} s; {load.progress}"
        )
        return act

    async def _left(self, deadline: float) -> Leaks:
        """Wait until no resources are held, or until the deadline (time.monotonic). Return the leaks."""
        while True:
            description = await self.site.describe()
            if description is not None and not (found := leaks(description)).any:
                return found
            if time.monotonic() > deadline:
                if description is None:
                    raise AssertionError("no scheduler answers at the end")
                return found
            await asyncio.sleep(LOOK_S)
