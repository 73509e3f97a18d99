"""The plans: which deployment, which faults, how long; and the seeded order of the faults."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from harness.chaos.faults import FAULTS
from harness.chaos.site import Shape

MTP = {"method": "mtp", "num_speculative_tokens": "auto", "max_speculative_tokens": 4}
HYBRID = {"method": "mtp", "mtp_strategy": "with_ngram", "num_speculative_tokens": 5}
GAP_S = (0.3, 1.5)  # between a site that is whole again and the next fault

DEATHS = ("kill-prefill", "kill-decode", "hang-prefill", "hang-decode")
WORKERS = (*DEATHS, "pause-worker", "kill-pair")
DRAINS = ("drain-prefill", "drain-decode", "operator-drain", "rolling-restart")
SCHEDULER = ("kill-scheduler", "lose-scheduler", "hang-scheduler", "drain-scheduler")
REDIS = ("kill-redis", "empty-redis", "hang-redis", "slow-redis", "fill-redis", "change-password")
NETWORK = ("drop-network", "interrupt-network", "delay-network")


@dataclass(frozen=True)
class Event:
    """A fault to come."""

    number: int
    fault: str
    stage: str
    gap_s: float  # before it
    hold_s: float
    draw: str  # seed of its own choices


@dataclass(frozen=True)
class Plan:
    """A deployment and the faults that it has to bear."""

    name: str
    shape: Shape
    faults: tuple[str, ...]
    about: str
    seconds: float = 120.0
    clients: int = 8
    rate: int = 0  # above 0: requests/s that are only placed (placing.py)
    once: bool = False  # end when each fault was done at each of its stages
    stages: dict[str, tuple[str, ...]] = field(default_factory=dict)  # instead of a fault's own
    hold_s: dict[str, tuple[float, float]] = field(default_factory=dict)  # the same
    every: int = 2  # one in so many prompts is used: each needs its long answer beforehand
    poison: int = 0  # clients whose requests break engines' steps (poisoners.py)
    long: bool = False  # all answers are streams of the greatest length
    least: dict[str, int] = field(default_factory=dict)  # figures that the plan has to reach: Outcome.meet
    most: dict[str, int] = field(default_factory=dict)  # and others that it must not pass

    def events(self, seed: int) -> Iterator[Event]:
        """Yield events without end, unless `once`: each round has all faults at all stages, shuffled.

        None where the plan has no faults.
        """
        draw = random.Random(f"{seed} {self.name}")
        numbers = itertools.count(1)
        while True:
            deck = [
                (name, stage) for name in self.faults for stage in self.stages.get(name, FAULTS[name].stages)
            ]
            draw.shuffle(deck)
            for name, stage in deck:
                yield Event(
                    next(numbers),
                    name,
                    stage,
                    round(draw.uniform(*GAP_S), 3),
                    round(draw.uniform(*self.hold_s.get(name, FAULTS[name].hold_s)), 3),
                    f"{seed} {self.name} {draw.getrandbits(32)}",
                )
            if self.once or not deck:
                return


PLANS: dict[str, Plan] = {}


def plan(one: Plan) -> None:
    """Register a plan. Raises ValueError for a name that is taken, or a fault that does not exist."""
    if one.name in PLANS:
        raise ValueError(f"there is a plan {one.name} already")
    if unknown := [name for name in one.faults if name not in FAULTS]:
        raise ValueError(f"{one.name}: no such fault: {', '.join(unknown)}")
    PLANS[one.name] = one


# Half an hour of faults in all, besides starts and ends.
plan(
    Plan(
        "workers-1p1d",
        Shape(1, 1, speculation=MTP),
        (*WORKERS, *DRAINS),
        "the only worker of a role dies, hangs or drains, at every stage",
        seconds=180.0,
    )
)
plan(
    Plan(
        "workers-2p2d",
        Shape(2, 2, speculation=MTP),
        (*WORKERS, *DRAINS),
        "one of two workers of a role dies, hangs or drains, at every stage",
        seconds=240.0,
        clients=12,
    )
)
plan(
    Plan(
        "hybrid-2p2d",
        Shape(2, 2, processes=2, speculation=HYBRID, redis=True),
        (*DEATHS, "kill-scheduler", "kill-redis"),
        "the same with drafts by MTP and n-grams together, over Redis, and a router of two processes",
        seconds=150.0,
        clients=12,
    )
)
plan(
    Plan(
        "scheduler-1p1d",
        Shape(1, 1, speculation=MTP),
        (*SCHEDULER, "kill-scheduler-and-decode"),
        "the only scheduler, which keeps its state in memory",
        seconds=120.0,
    )
)
plan(
    Plan(
        "redis-1p1d",
        Shape(1, 1, redis=True, speculation=MTP),
        (*REDIS, "kill-scheduler", "kill-redis-and-scheduler", "start-scheduler-without-redis"),
        "Redis under the only scheduler",
        seconds=150.0,
    )
)
plan(
    Plan(
        "replicas-2p2d",
        Shape(2, 2, schedulers=2, routers=2, redis=True, speculation=MTP),
        (*SCHEDULER, *REDIS, "kill-router", "drain-router", "hang-router", "kill-decode"),
        "two schedulers over Redis, two routers",
        seconds=240.0,
        clients=12,
    )
)
plan(
    Plan(
        "network-2p2d",
        Shape(2, 2, proxied=True, speculation=MTP),
        NETWORK,
        "a network that drops and delays before each worker",
        seconds=120.0,
        clients=12,
    )
)
plan(
    Plan(
        "roles-2p2d",
        Shape(2, 2, speculation=MTP),
        ("flip-role",),
        "workers change their roles: more than 50 times",
        seconds=80.0,
        clients=12,
    )
)
plan(
    Plan(
        "handoffs-1p1d",
        Shape(1, 1, staging_mib=12, speculation=MTP),
        ("corrupt-handoffs", "kill-prefill", "kill-decode", "hang-prefill"),
        "corrupted KV, and hardly any room for saved KV",
        seconds=120.0,
    )
)
plan(
    Plan(
        "full-house",
        Shape(1, 1, slots=2, routers=2, redis=True, speculation=MTP),
        (
            "kill-scheduler",
            "kill-redis",
            "kill-router",
            "drain-router",
            "kill-prefill",
            "kill-decode",
            "hang-decode",
        ),
        "six times as many requests as slots: most of them wait in the routers",
        seconds=90.0,
        clients=12,
    )
)
plan(
    Plan(
        "supervised-1p1d",
        Shape(1, 1, supervised=True, speculation=MTP),
        ("kill-watcher", "kill-prefill", "kill-decode"),
        "`baton up` itself: workers die, and what watches them, and it starts them again",
        seconds=90.0,
        once=True,  # a part that dies a fourth time within ten minutes is given up
    )
)
plan(
    Plan(
        "long-queue",
        Shape(1, 1, slots=4, queue_factor=3.0, hold_lease_s=2.0, speculation=MTP),
        (),
        "no faults: three times as many long streams at the decode worker as it has slots, none read twice",
        seconds=45.0,
        clients=12,
        long=True,
        least={"most_booked": 12},
        most={"recomputed": 0, "handoff": 0, "lost": 0},
    )
)
plan(
    Plan(
        "full-staging",
        Shape(1, 1, slots=2, queue_factor=6.0, staging_mib=4, speculation=MTP),
        (),
        "no faults: saved KV waits for slots until staging is full, and the prefill worker refuses prompts",
        seconds=45.0,
        clients=12,
        long=True,
        least={"refused": 1},
    )
)
plan(
    Plan(
        "poison",
        Shape(2, 2, speculation=MTP, poison=True),
        ("kill-prefill", "kill-decode"),
        "requests that break engines, alone or in pairs, by the dozen among honest ones; workers die as well",
        seconds=90.0,
        clients=8,
        poison=6,
    )
)
plan(
    Plan(
        "placements",
        Shape(0, 0, routers=0, schedulers=2, redis=True),
        (*SCHEDULER, *REDIS, "lose-schedulers"),
        "500 placements/s by two schedulers over Redis, on 20 workers without engines",
        seconds=120.0,
        rate=500,
    )
)
plan(
    Plan(
        "short",
        Shape(2, 2, speculation=MTP),
        ("kill-decode", "hang-prefill"),
        "one kill and one hang, each of another worker role: a part of the tests, not of `all`",
        seconds=30.0,
        clients=6,
        once=True,
        stages={"kill-decode": ("stream",), "hang-prefill": ("prefill",)},
        hold_s={"hang-prefill": (3.3, 4.0)},
        every=9,
    )
)
ALL = [name for name in PLANS if name != "short"]
