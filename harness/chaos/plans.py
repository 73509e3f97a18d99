"""The plans: deployments, their faults, and the seeded order and timing of the faults."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from harness.chaos.faults import FAULTS
from harness.chaos.victims import Shape

MTP = {"method": "mtp", "num_speculative_tokens": "auto", "max_speculative_tokens": 4}
FIXED = {"method": "mtp", "num_speculative_tokens": 2}
HYBRID = {"method": "mtp", "mtp_strategy": "with_ngram", "num_speculative_tokens": 5}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 4}
GAP_S = (0.3, 1.5)  # the next fault comes this long after the site is whole

DEATHS = ("kill-prefill", "kill-decode", "hang-prefill", "hang-decode")
WORKERS = (*DEATHS, "pause-worker", "kill-pair")
DRAINS = ("drain-prefill", "drain-decode", "operator-drain", "rolling-restart")
SCHEDULER = ("kill-scheduler", "lose-scheduler", "hang-scheduler", "drain-scheduler")
REDIS = ("kill-redis", "empty-redis", "hang-redis", "slow-redis", "fill-redis", "change-password")
ROUTER = ("kill-router", "drain-router")


@dataclass(frozen=True)
class Event:
    number: int
    fault: str
    stage: str
    gap_s: float  # the pause before it
    hold_s: float
    draw: str  # seed of the fault's choices


@dataclass(frozen=True)
class Plan:
    name: str
    shape: Shape
    faults: tuple[str, ...]
    seconds: float
    clients: int
    about: str
    rate: int = 0  # if not 0, only place this many requests per second (placing.py)
    once: bool = False  # end after each fault has struck at each of its stages
    stages: dict[str, tuple[str, ...]] = field(default_factory=dict)  # override a fault's stages
    hold_s: dict[str, tuple[float, float]] = field(default_factory=dict)  # override a fault's times
    every: int = 2  # use every n-th prompt; each needs a recorded answer
    poison: int = 0  # clients whose requests break engines' steps (poisoners.py)
    long: bool = False  # all answers are streams of the maximum length
    least: dict[str, int] = field(default_factory=dict)  # lower bounds of figures; see Outcome.meet
    most: dict[str, int] = field(default_factory=dict)  # upper bounds

    def events(self, seed: int) -> Iterator[Event]:
        """Yield all faults at all stages, shuffled, in endless rounds unless `once`."""
        draw = random.Random(f"{seed} {self.name}")
        numbers = itertools.count(1)
        deck = [(name, stage) for name in self.faults for stage in self.stages.get(name, FAULTS[name].stages)]
        while deck:
            shuffled = deck.copy()
            draw.shuffle(shuffled)
            for name, stage in shuffled:
                gap_s = round(draw.uniform(*GAP_S), 3)
                hold_s = round(draw.uniform(*self.hold_s.get(name, FAULTS[name].hold_s)), 3)
                seed_of_it = f"{seed} {self.name} {draw.getrandbits(32)}"
                yield Event(next(numbers), name, stage, gap_s, hold_s, seed_of_it)
            if self.once:
                return


# The plans' faults take half an hour in total, not counting starts and ends.
# fmt: off
_PLANS = (
    Plan("workers-1p1d", Shape(1, 1, speculation=MTP), (*WORKERS, *DRAINS), 180.0, 8,
         "the only worker of a role dies, hangs or drains, at every stage"),
    Plan("workers-2p2d", Shape(2, 2, speculation=MTP), (*WORKERS, *DRAINS), 240.0, 12,
         "one of two workers of a role dies, hangs or drains, at every stage"),
    Plan("hybrid-2p2d", Shape(2, 2, processes=2, speculation=HYBRID, redis=True),
         (*DEATHS, "kill-scheduler", "kill-redis"), 150.0, 12,
         "the same with drafts by MTP and n-grams together, over Redis, and a router of two processes"),
    Plan("scheduler-1p1d", Shape(1, 1, speculation=MTP), (*SCHEDULER, "kill-scheduler-and-decode"), 120.0, 8,
         "the only scheduler, which keeps its state in memory"),
    Plan("redis-1p1d", Shape(1, 1, redis=True, speculation=MTP),
         (*REDIS, "kill-scheduler", "kill-redis-and-scheduler", "start-scheduler-without-redis"), 150.0, 8,
         "Redis under the only scheduler"),
    Plan("replicas-2p2d", Shape(2, 2, schedulers=2, routers=2, redis=True, speculation=MTP),
         (*SCHEDULER, *REDIS, *ROUTER, "hang-router", "kill-decode"), 240.0, 12,
         "two schedulers over Redis, two routers"),
    Plan("network-2p2d", Shape(2, 2, proxied=True, speculation=MTP),
         ("drop-network", "interrupt-network", "delay-network"), 120.0, 12,
         "a network that drops and delays before each worker"),
    Plan("roles-2p2d", Shape(2, 2, speculation=MTP), ("flip-role",), 80.0, 12,
         "workers change their roles: more than 50 times"),
    Plan("gangs", Shape(1, 1, gang=2, proxied=True, speculation=FIXED),
         (*DEATHS, "pause-worker", "late-member", "drop-network", "interrupt-network",
          "drain-prefill", "drain-decode", "operator-drain", "flip-role"), 180.0, 8,
         "a worker of a prefill or decode gang dies, hangs, is cut off or comes late; gangs drain and flip"),
    Plan("images", Shape(1, 1, encode=1, proxied=True, speculation=NGRAM),
         (*DEATHS, "kill-encode", "hang-encode", "pause-worker", "drop-network", "interrupt-network"),
         90.0, 8,
         "images beside text: the encode worker, or the only one of another role, dies, hangs or is cut off",
         stages={**dict.fromkeys(("kill-prefill", "hang-prefill"), ("prefill",)),
                 **dict.fromkeys(("kill-decode", "hang-decode"), ("stream",))}),
    Plan("handoffs-1p1d", Shape(1, 1, staging_mib=12, speculation=MTP),
         ("corrupt-handoffs", "kill-prefill", "kill-decode", "hang-prefill"), 120.0, 8,
         "corrupted KV, and hardly any room for saved KV"),
    Plan("full-house", Shape(1, 1, slots=2, routers=2, redis=True, speculation=MTP),
         ("kill-scheduler", "kill-redis", *ROUTER, "kill-prefill", "kill-decode", "hang-decode"), 90.0, 12,
         "six times as many requests as slots: most of them wait in the routers"),
    Plan("supervised-1p1d", Shape(1, 1, supervised=True, speculation=MTP),
         ("kill-watcher", "kill-prefill", "kill-decode"), 90.0, 8,
         "`baton up` itself: workers and their watcher die, and it starts them again",
         once=True),  # `baton up` gives up on a part that dies four times within ten minutes
    Plan("long-queue", Shape(1, 1, slots=4, queue_factor=3.0, hold_lease_s=2.0, speculation=MTP),
         (), 45.0, 12,
         "no faults: three long streams for each slot of the decode worker, no prompt prefilled twice",
         long=True, least={"most_booked": 12}, most={"recomputed": 0, "handoff": 0, "lost": 0}),
    Plan("full-staging", Shape(1, 1, slots=2, queue_factor=6.0, staging_mib=4, speculation=MTP),
         (), 45.0, 12,
         "no faults: saved KV waits for slots until staging is full, and prompts are refused",
         long=True, least={"refused": 1}),
    Plan("poison", Shape(2, 2, speculation=MTP, poison=True), ("kill-prefill", "kill-decode"), 90.0, 8,
         "requests that break engines, alone or in pairs, among honest ones; workers die as well",
         poison=6),
    Plan("placements", Shape(0, 0, routers=0, schedulers=2, redis=True),
         (*SCHEDULER, *REDIS, "lose-schedulers"), 120.0, 8,
         "500 placements/s by two schedulers over Redis, on 20 workers without engines",
         rate=500),
    Plan("short", Shape(2, 2, speculation=MTP), ("kill-decode", "hang-prefill"), 30.0, 3,
         "one kill and one hang, each of another worker role: a part of the tests, not of `all`",
         once=True, every=9, stages={"kill-decode": ("stream",), "hang-prefill": ("prefill",)},
         hold_s={"hang-prefill": (3.3, 4.0)}),
)
# fmt: on
PLANS = {one.name: one for one in _PLANS}
ALL = [name for name in PLANS if name != "short"]
