"""Which alert must name which fault, and how soon: Prometheus beside the deployment under test."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from harness.chaos.faults import ANY, FAULTS, Act
from harness.chaos.load import Load
from harness.chaos.site import Site
from harness.prometheus import Firing, Prometheus

LOOK_S = 0.5  # between two looks at Prometheus
GOAL_S = 15.0  # from Prometheus' first word of it until the alert fires
PATIENCE_S = 60.0  # for an alert
CALM_S = 180.0  # until all alerts are over: most look at the last minute
LASTING = frozenset({"BatonWorkerRestarting"})  # looks at ten minutes: after three deaths it is right to stay
MOMENT_S = 0.5  # the longest time between a fault's begin and its harm

_LOST, _SCHEDULER, _STORE, _DOWN = (
    "BatonWorkerLost",
    "BatonSchedulerAway",
    "BatonStoreAway",
    "BatonProcessDown",
)
NAMED = {
    "kill-prefill": _LOST,
    "hang-prefill": _LOST,
    "kill-decode": _LOST,
    "hang-decode": _LOST,
    "kill-pair": _LOST,
    "drop-network": "BatonRetries",  # its heartbeats still come: only what others send to it is lost
    "corrupt-handoffs": "BatonHandoffsFailing",
    "kill-scheduler": _SCHEDULER,
    "lose-scheduler": _SCHEDULER,
    "hang-scheduler": _SCHEDULER,
    "kill-scheduler-and-decode": _SCHEDULER,
    "lose-schedulers": "BatonPlacingAlone",
    "kill-redis": _STORE,
    "empty-redis": _STORE,
    "hang-redis": _STORE,
    "fill-redis": _STORE,
    "change-password": _STORE,
    "kill-redis-and-scheduler": _SCHEDULER,  # which alone would have missed Redis, back before it
    "start-scheduler-without-redis": _STORE,
    "kill-router": _DOWN,
    "hang-router": _DOWN,
}
_PLANNED, _SHORT = "an operator does it", "it is shorter than a lease, so nobody is missed"
UNHEARD = {
    "pause-worker": _SHORT,
    "interrupt-network": _SHORT,
    "drain-prefill": _PLANNED,
    "drain-decode": _PLANNED,
    "rolling-restart": _PLANNED,
    "operator-drain": _PLANNED,
    "flip-role": _PLANNED,
    "drain-scheduler": _PLANNED,
    "drain-router": _PLANNED,
    "kill-watcher": "no request needs it (the worker that dies with it is in kill-decode)",
    "delay-network": "everything stays within its deadline; the time to first token shows it",
    "slow-redis": "no request needs it",
}
HOLD_S = {"kill-router": 2.0}  # longer than by default, so that it is seen, but for this one
HELD_S = 25.0


@dataclass(frozen=True)
class Heard:
    """A fault, and what Prometheus said of it. Seconds since the fault began."""

    fault: str
    alert: str
    noticed_s: float | None  # its expression was true
    fired_s: float | None  # it fires; None: not in time
    others: tuple[str, ...] = ()  # that began to fire, too

    @property
    def good(self) -> bool:
        """Whether the alert came in time."""
        if self.noticed_s is None or self.fired_s is None:
            return False
        return self.fired_s - self.noticed_s <= GOAL_S


@dataclass
class Quiet:
    """A time without faults."""

    seconds: float = 0.0
    alerts: dict[str, int] = field(default_factory=dict)  # that fired all the same: looks that saw each


async def firing(prometheus: Prometheus) -> list[Firing]:
    """Return what fires now."""
    return await asyncio.to_thread(prometheus.firing)


async def calm(prometheus: Prometheus, within_s: float = CALM_S) -> None:
    """Wait until nothing fires, but for what is LASTING. Raises AssertionError."""
    deadline = time.monotonic() + within_s
    while found := {one.name for one in await firing(prometheus)} - LASTING:
        if time.monotonic() > deadline:
            raise AssertionError(f"still firing after {within_s:g} s: {sorted(found)}")
        await asyncio.sleep(LOOK_S)


async def quiet(prometheus: Prometheus, seconds: float) -> Quiet:
    """Watch a healthy deployment."""
    found, began = Quiet(), time.monotonic()
    while (now := time.monotonic()) < began + seconds:
        for one in await firing(prometheus):
            found.alerts[one.name] = found.alerts.get(one.name, 0) + 1
        await asyncio.sleep(min(LOOK_S * 4, max(0.01, began + seconds - now)))
    found.seconds = time.monotonic() - began
    return found


async def hear(
    name: str,
    site: Site,
    load: Load,
    prometheus: Prometheus,
    draw: random.Random,
    look: Callable[[], Awaitable[None]],
) -> Heard:
    """Do a fault, and wait for its alert; `look` once it fires. The caller waits until the site is whole."""
    alert = NAMED[name]
    least, most = FAULTS[name].hold_s
    hold_s = HOLD_S.get(name, HELD_S) if most else least
    before = {one.name for one in await firing(prometheus)}
    began = time.time()
    breaking = asyncio.ensure_future(FAULTS[name].run(Act(site, load, draw, ANY, hold_s)))
    noticed: float | None = None
    fired: float | None = None
    others: set[str] = set()
    looking: asyncio.Future[None] | None = None
    try:
        while time.time() < began + PATIENCE_S and not (breaking.done() and fired is not None):
            for one in await firing(prometheus):
                if one.name == alert and fired is None:
                    noticed, fired = one.since - began, time.time() - began
                    looking = asyncio.ensure_future(look())
                if one.name != alert and one.name not in before:
                    others.add(one.name)
            await asyncio.sleep(LOOK_S)
        await breaking
        if looking is not None:
            await looking
    finally:
        breaking.cancel()
        if looking is not None:
            looking.cancel()
    return Heard(name, alert, noticed, fired, tuple(sorted(others)))
