"""Check that each fault raises its alert in time."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass, field

from harness.chaos.faults import ANY, FAULTS, Act
from harness.chaos.load import Load
from harness.chaos.site import Site
from harness.prometheus import Firing, Prometheus

LOOK_S = 0.5  # the time between polls of Prometheus
GOAL_S = 15.0  # the alert must fire this soon after its expression becomes true
PATIENCE_S = 60.0  # timeout for an alert
CALM_S = 180.0  # timeout for all alerts to resolve: most cover the last minute
LASTING = frozenset({"BatonWorkerRestarting"})  # covers ten minutes, so it rightly stays after three deaths

NAMED = {
    **dict.fromkeys(
        ("kill-prefill", "hang-prefill", "kill-decode", "hang-decode", "kill-pair"), "BatonWorkerLost"
    ),
    "drop-network": "BatonRetries",  # only messages to the worker are lost; its heartbeats still arrive
    "corrupt-handoffs": "BatonHandoffsFailing",
    **dict.fromkeys(
        ("kill-scheduler", "lose-scheduler", "hang-scheduler", "kill-scheduler-and-decode"),
        "BatonSchedulerAway",
    ),
    "lose-schedulers": "BatonPlacingAlone",
    **dict.fromkeys(
        ("kill-redis", "empty-redis", "hang-redis", "fill-redis", "change-password"), "BatonStoreAway"
    ),
    "kill-redis-and-scheduler": "BatonSchedulerAway",  # Redis is back before a scheduler misses it
    "start-scheduler-without-redis": "BatonStoreAway",
    "kill-router": "BatonProcessDown",
    "hang-router": "BatonProcessDown",
}
_PLANNED = ("drain-prefill", "drain-decode", "rolling-restart", "operator-drain", "flip-role")
UNHEARD = {
    **dict.fromkeys(("pause-worker", "interrupt-network"), "it is shorter than a lease"),
    **dict.fromkeys((*_PLANNED, "drain-scheduler", "drain-router"), "an operator does it"),
    "kill-watcher": "no request needs it (kill-decode covers the worker that dies with it)",
    **dict.fromkeys(("kill-encode", "hang-encode"), "kill-decode and hang-decode cover a lost worker"),
    "late-member": "kill-decode covers the worker that dies, and the board of workers shows the rest",
    "delay-network": "everything stays within its deadline; the time to first token shows it",
    "slow-redis": "no request needs it",
}
HELD_S = 25.0  # longer than in the plans, so that the faults raise alerts


@dataclass(frozen=True)
class Heard:
    """A fault and its alert. Times are seconds since the fault began."""

    fault: str
    alert: str
    noticed_s: float | None  # when the alert's expression became true
    fired_s: float | None  # when the alert fired; None: not within PATIENCE_S
    others: tuple[str, ...] = ()  # other alerts that fired

    @property
    def good(self) -> bool:
        if self.noticed_s is None or self.fired_s is None:
            return False
        return self.fired_s - self.noticed_s <= GOAL_S


@dataclass
class Quiet:
    seconds: float = 0.0
    alerts: dict[str, int] = field(default_factory=dict)  # alert -> polls in which it fired


async def firing(prometheus: Prometheus) -> list[Firing]:
    return await asyncio.to_thread(prometheus.firing)


async def calm(prometheus: Prometheus, within_s: float = CALM_S) -> None:
    """Wait until no alert fires except LASTING. Raises AssertionError after `within_s`."""
    deadline = time.monotonic() + within_s
    while found := {one.name for one in await firing(prometheus)} - LASTING:
        if time.monotonic() > deadline:
            raise AssertionError(f"still firing after {within_s:g} s: {sorted(found)}")
        await asyncio.sleep(LOOK_S)


async def quiet(prometheus: Prometheus, seconds: float) -> Quiet:
    found, began = Quiet(), time.monotonic()
    while (now := time.monotonic()) < began + seconds:
        for one in await firing(prometheus):
            found.alerts[one.name] = found.alerts.get(one.name, 0) + 1
        await asyncio.sleep(min(LOOK_S * 4, max(0.01, began + seconds - now)))
    found.seconds = time.monotonic() - began
    return found


async def hear(name: str, site: Site, load: Load, prometheus: Prometheus, draw: random.Random) -> Heard:
    """Run a fault and wait for its alert, but not until the site is whole again."""
    alert = NAMED[name]
    least, most = FAULTS[name].hold_s
    hold_s = 2.0 if name == "kill-router" else HELD_S if most else least
    before = {one.name for one in await firing(prometheus)}
    began = time.time()
    breaking = asyncio.ensure_future(FAULTS[name].run(Act(site, load, draw, ANY, hold_s)))
    noticed: float | None = None
    fired: float | None = None
    others: set[str] = set()
    try:
        while time.time() < began + PATIENCE_S and not (breaking.done() and fired is not None):
            for one in await firing(prometheus):
                if one.name == alert and fired is None:
                    noticed, fired = one.since - began, time.time() - began
                if one.name != alert and one.name not in before:
                    others.add(one.name)
            await asyncio.sleep(LOOK_S)
        await breaking
    finally:
        breaking.cancel()
    return Heard(name, alert, noticed, fired, tuple(sorted(others)))
