"""The chaos faults, by name in FAULTS. plans.py says which plan uses which of them.

A fault breaks something, waits for a given time and repairs it; afterwards `Site.whole` must become true by
itself. A fault uses only its `Act`.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from redis.asyncio import Redis

from baton.protos import scheduler_pb2 as pb
from baton.scheduler.client import SchedulerClient
from harness.chaos.corruption import corrupt, record_bytes
from harness.chaos.load import Answer, Load
from harness.chaos.site import Site
from harness.chaos.victims import Part
from harness.scheduling import RedisServer

MOMENT_S = 5.0  # timeout for a request to reach a stage
LONG_PROMPT = 200  # tokens; the handoff is long enough to be hit
STREAMED = 8  # tokens after which an answer is well under way

ANY = "any"
QUEUE, PREFILL, HANDOFF, STREAM = "queue", "prefill", "handoff", "stream"
"""Stages of a request at a worker: it is queued; it is prefilled; it has one token, so its KV is pinned or
being pulled; it has more tokens."""

LONG = (4.0, 8.0)  # seconds; longer than a worker's lease of 3 s
SHORT = (0.3, 1.5)  # shorter than the lease
ROLES = {"prefill": pb.ROLE_PREFILL, "decode": pb.ROLE_DECODE, "mixed": pb.ROLE_MIXED}


@dataclass
class Act:
    """A running fault and everything that it may use."""

    site: Site
    load: Load | None  # None: no requests are sent
    draw: random.Random
    stage: str
    hold_s: float
    census: Counter[str] = field(default_factory=Counter)  # "role stage" -> requests that the fault hit
    struck: float = 0.0  # when `moment` ended (time.monotonic); 0: not yet

    def pick(self, *kinds: str) -> Part:
        return self.draw.choice(self.site.of(*kinds))

    async def hold(self) -> None:
        await asyncio.sleep(self.hold_s)

    async def moment(self, victim: Part) -> None:
        """Wait for the stage, at most MOMENT_S, then count the requests at each stage."""
        deadline = time.monotonic() + MOMENT_S

        def handed_over(one: Answer) -> bool:
            long = len(one.arrivals) == 1 and len(one.case.prompt) >= LONG_PROMPT
            return long and victim.worker_id in self.workers(one)

        if self.stage == HANDOFF:
            await self.answers.event(handed_over, MOMENT_S)
            await asyncio.sleep(self.draw.choice([0.0, 0.0, 0.001, 0.003, 0.006, 0.012]))
        elif self.stage == STREAM:
            await self.answers.event(
                lambda one: len(one.tokens) >= STREAMED and victim.worker_id in self.workers(one), MOMENT_S
            )
        elif self.stage in (QUEUE, PREFILL):
            enough = 2 if self.stage == QUEUE else 1
            while self.prefilling(victim) < enough and time.monotonic() < deadline:  # noqa: ASYNC110 (no event)
                await asyncio.sleep(0.005)
        else:
            await asyncio.sleep(self.draw.uniform(0.0, 0.5))
        self.struck = time.monotonic()
        self.count(victim)

    def workers(self, answer: Answer) -> tuple[str, str]:
        """Return a request's prefill and decode worker as the scheduler last reported them, or ""."""
        pairs = (pair for request_id, pair in self.site.live.items() if answer.request_id in request_id)
        return next(pairs, ("", ""))

    def prefilling(self, victim: Part) -> int:
        """Return how many requests a worker is prefilling or has queued."""
        running = self.answers.running.values()
        return sum(not one.tokens and self.workers(one)[0] == victim.worker_id for one in running)

    def count(self, victim: Part) -> None:
        """Count the affected requests by stage. The oldest one without tokens counts as prefilling."""
        if self.load is None:
            return
        waiting = 0
        for answer in sorted(self.answers.running.values(), key=lambda one: one.sent):
            prefill, decode = self.workers(answer)
            if victim.is_worker and victim.worker_id not in (prefill, decode):
                continue
            if victim.kind == "router" and answer.router is not victim:
                continue
            if not answer.tokens:
                stage = PREFILL if not waiting and victim.worker_id == prefill else QUEUE
                waiting += 1
            else:
                stage = HANDOFF if len(answer.tokens) == 1 else STREAM
            if stage != STREAM or victim.kind != "prefill":  # a streaming request has left its prefill worker
                self.census[f"{victim.kind} {stage}"] += 1

    @property
    def answers(self) -> Load:
        if self.load is None:
            raise RuntimeError("the plan sends no requests: its faults cannot wait for a stage")
        return self.load

    @property
    def redis(self) -> RedisServer:
        if self.site.redis is None:
            raise RuntimeError("the plan has no Redis")
        return self.site.redis


Run = Callable[[Act], Awaitable[None]]


@dataclass(frozen=True)
class Fault:
    name: str
    about: str
    run: Run
    stages: tuple[str, ...] = (ANY,)  # at which it may strike
    hold_s: tuple[float, float] = (0.0, 0.0)  # minimum and maximum


# -- faults that are a list of steps


async def _end_well(act: Act, victim: Part) -> None:
    if code := await victim.ended():
        act.site.crashes.append(f"{victim.worker_id} ended with {code} instead of draining")


_ON_PARTS: dict[str, Callable[[Act, Part], Awaitable[None] | None]] = {
    "moment": lambda act, part: act.moment(part),
    "kill": lambda _, part: part.kill(),
    "hang": lambda _, part: part.hang(),
    "wake": lambda _, part: part.wake(),
    "drain": lambda _, part: part.drain(),
    "end": _end_well,
    "restart": lambda _, part: part.restart(),
}
_ON_REDIS: dict[str, Callable[[RedisServer], None]] = {
    "stop": RedisServer.stop,
    "empty": lambda redis: shutil.rmtree(redis.folder / "appendonlydir", ignore_errors=True),
    "start": RedisServer.start,
    "hang": RedisServer.hang,
    "wake": RedisServer.wake,
}


def steps(text: str) -> Run:
    """Return a fault that takes these steps. `hold` waits; every other step names a kind of part, or redis.

    A kind means the same part in all steps: one of that kind, or of any of the kinds separated by bars.
    `schedulers` means all schedulers.
    """
    parsed = [step.partition(" ") for step in text.split(", ")]
    for verb, _, kind in parsed:
        assert verb in (_ON_REDIS if kind == "redis" else _ON_PARTS if kind else ["hold"]), verb

    async def run(act: Act) -> None:
        victims: dict[str, list[Part]] = {"schedulers": act.site.of("scheduler")}
        for verb, _, kind in parsed:
            if not kind:
                await act.hold()
            elif kind == "redis":
                await asyncio.to_thread(_ON_REDIS[verb], act.redis)
            else:
                if kind not in victims:
                    victims[kind] = [act.pick(*kind.split("|"))]
                for victim in victims[kind]:
                    if (coming := _ON_PARTS[verb](act, victim)) is not None:
                        await coming

    return run


def kill(kind: str) -> Run:
    return steps(f"moment {kind}, kill {kind}, hold, restart {kind}")


def hang(kind: str) -> Run:
    return steps(f"moment {kind}, hang {kind}, hold, wake {kind}")


def drain(kind: str) -> Run:
    return steps(f"moment {kind}, drain {kind}, end {kind}, restart {kind}")


# -- workers


async def rolling_restart(act: Act) -> None:
    for victim in list(act.site.workers):
        act.count(victim)
        victim.drain()
        await _end_well(act, victim)
        await victim.restart()
        await act.site.whole(60.0)


async def operator_drain(act: Act) -> None:
    victim = act.pick("prefill", "decode")
    await act.moment(victim)
    async with SchedulerClient(act.site.scheduler_address) as operator:
        victim.leave()
        asked = await operator.drain(victim.worker_id)
        if asked.problem:
            raise AssertionError(f"{victim.worker_id} does not drain: {asked.problem}")
        try:
            await _end_well(act, victim)
            await victim.restart()
            await act.site.held(victim)
            await _takes_nothing(act, victim)
        finally:
            undone = await operator.undrain(victim.name)
    if undone.problem:
        raise AssertionError(f"{victim.name} stays drained: {undone.problem}")


async def _takes_nothing(act: Act, victim: Part) -> None:
    """Check that a worker accepts no requests for as long as the fault lasts."""
    until = time.monotonic() + act.hold_s
    while time.monotonic() < until:
        one = act.site.status(victim)
        if one is not None and (one.reserved_requests or one.load.running or one.load.waiting):
            raise AssertionError(f"{victim.worker_id} is drained but has {one.reserved_requests} requests")
        await asyncio.sleep(0.02)


async def flip_role(act: Act) -> None:
    """Change a worker's role."""
    victim = act.pick(*ROLES)
    told = act.site.description
    has = {one.identity.worker_id: one.identity.role for one in told.workers} if told is not None else {}
    others = [role for role in ROLES.values() if role != has.get(victim.worker_id)]
    act.count(victim)
    async with SchedulerClient(act.site.scheduler_address) as operator:
        reply = await operator.set_role(victim.worker_id, act.draw.choice(others))
    if reply.problem:
        raise AssertionError(f"{victim.worker_id} keeps its role: {reply.problem}")
    await act.hold()


async def corrupt_handoffs(act: Act) -> None:
    until, size = time.monotonic() + act.hold_s, record_bytes()
    seen: set[int] = set()
    while time.monotonic() < until:
        for worker in act.site.of("prefill"):
            act.census["saves corrupted"] += corrupt(worker.pid, act.draw, seen, size)
        await asyncio.sleep(0.002)


def disturb(*, drop: bool) -> Run:
    async def run(act: Act) -> None:
        victim = act.pick("prefill", "decode", "encode")
        if victim.proxy is None:
            raise RuntimeError("the plan has no proxies")
        await act.moment(victim)
        if drop:
            victim.gone()
            victim.proxy.drop()
        else:
            victim.proxy.delay_s = 0.2
        try:
            await act.hold()
        finally:
            victim.proxy.mend()

    return run


# -- Redis


async def slow_redis(act: Act) -> None:
    until = time.monotonic() + act.hold_s
    while time.monotonic() < until:
        act.redis.hang()
        await asyncio.sleep(0.3)
        act.redis.wake()
        await asyncio.sleep(0.3)


async def fill_redis(act: Act) -> None:
    async with Redis.from_url(act.redis.url) as admin:
        await admin.config_set("maxmemory", "1")
        await act.hold()
        await admin.config_set("maxmemory", "0")


async def change_password(act: Act) -> None:
    async with Redis.from_url(act.redis.url) as admin:
        await admin.config_set("requirepass", "another")
        await admin.client_kill_filter(_type="normal", skipme=True)
        await act.hold()
        await admin.config_set("requirepass", "")


# fmt: off
_FAULTS = (
    Fault("kill-prefill", "Kill a prefill worker.", kill("prefill"), (QUEUE, PREFILL, HANDOFF)),
    Fault("hang-prefill", "Stop a prefill worker for longer than its lease.", hang("prefill"),
          (QUEUE, PREFILL, HANDOFF), LONG),
    Fault("kill-decode", "Kill a decode worker.", kill("decode"), (HANDOFF, STREAM)),
    Fault("hang-decode", "Stop a decode worker for longer than its lease.", hang("decode"),
          (HANDOFF, STREAM), LONG),
    Fault("kill-encode", "Kill an encode worker.", kill("encode")),
    Fault("hang-encode", "Stop an encode worker for longer than its lease.", hang("encode"), hold_s=LONG),
    Fault("pause-worker", "Stop any worker for less than its lease.", hang("prefill|decode|encode"),
          hold_s=SHORT),
    Fault("kill-watcher", "Kill the watcher of `baton up`, which tells when workers are ready; then a decode "
          "worker.",
          steps("moment decode, kill watcher, restart watcher, kill decode, restart decode")),
    Fault("kill-pair", "Kill a prefill and a decode worker at once.",
          steps("moment prefill, kill prefill, kill decode, restart prefill, restart decode"), (HANDOFF,)),
    Fault("late-member", "Kill a worker of a gang, and start it again only later: the others wait for it.",
          kill("prefill|decode"), hold_s=LONG),
    Fault("drain-prefill", "Terminate a prefill worker, and start another one.", drain("prefill")),
    Fault("drain-decode", "Terminate a decode worker, and start another one.", drain("decode")),
    Fault("rolling-restart", "Terminate all workers, one after the other, each replaced before the next.",
          rolling_restart),
    Fault("operator-drain", "Run `baton drain` on a worker: started again it takes nothing until "
          "`baton undrain`.", operator_drain, hold_s=SHORT),
    Fault("flip-role", "Run `baton role` on a worker at work. The next flip starts from its new role.",
          flip_role, hold_s=(0.0, 0.5)),
    Fault("corrupt-handoffs", "Flip a bit in each save of a prefill worker that waits to be pulled, as "
          "soon as it is complete.",
          corrupt_handoffs, hold_s=LONG),
    Fault("drop-network", "Drop all traffic of a worker for longer than its lease, but "
          "leave its connections open.",
          disturb(drop=True), hold_s=LONG),
    Fault("interrupt-network", "Drop all traffic of a worker for less than its lease, but "
          "leave its connections open.", disturb(drop=True),
          hold_s=SHORT),
    Fault("delay-network", "Delay all traffic of a worker by 200 ms.", disturb(drop=False), hold_s=LONG),
    Fault("kill-scheduler", "Kill a scheduler, and start another one at once.", kill("scheduler")),
    Fault("lose-scheduler", "Kill a scheduler, and start another one only later.", kill("scheduler"),
          hold_s=LONG),
    Fault("hang-scheduler", "Stop a scheduler for longer than workers' leases.", hang("scheduler"),
          hold_s=LONG),
    Fault("lose-schedulers", "Kill all schedulers at once, and start others only later: routers place alone.",
          steps("kill schedulers, hold, restart schedulers"), hold_s=LONG),
    Fault("drain-scheduler", "Terminate a scheduler, and start another one.", drain("scheduler")),
    Fault("kill-scheduler-and-decode", "Kill a scheduler, then a decode worker while no scheduler answers.",
          steps("kill scheduler, moment decode, kill decode, restart decode, hold, restart scheduler"),
          hold_s=LONG),
    Fault("kill-redis", "Kill Redis, which comes back with what it had written to disk.",
          steps("moment scheduler, stop redis, hold, start redis"), hold_s=LONG),
    Fault("empty-redis", "Kill Redis, which comes back empty.",
          steps("moment scheduler, stop redis, empty redis, hold, start redis"), hold_s=LONG),
    Fault("hang-redis", "Stop Redis.", steps("moment scheduler, hang redis, hold, wake redis"),
          hold_s=LONG),
    Fault("slow-redis", "Stop Redis for 0.3 s again and again.", slow_redis, hold_s=LONG),
    Fault("fill-redis", "Leave Redis no memory: it refuses writes.", fill_redis, hold_s=LONG),
    Fault("change-password", "Change the password of Redis for a while, and close all its connections.",
          change_password, hold_s=LONG),
    Fault("kill-redis-and-scheduler", "Kill Redis and a scheduler at once; Redis is back first.",
          steps("moment scheduler, stop redis, kill scheduler, hold, start redis, restart scheduler"),
          hold_s=LONG),
    Fault("start-scheduler-without-redis", "Kill Redis and a scheduler at once; the scheduler is back first, "
          "and Redis comes back empty.",
          steps("moment scheduler, stop redis, kill scheduler, empty redis, restart scheduler, hold, "
                "start redis"),
          hold_s=LONG),
    Fault("kill-router", "Kill one of several routers: its own connections break, the others' do not.",
          kill("router"), hold_s=(0.5, 2.0)),
    Fault("drain-router", "Terminate one of several routers: it ends its streams, and the others take new "
          "requests.", drain("router")),
    Fault("hang-router", "Stop one of several routers, also for longer than workers and schedulers wait for "
          "it.", hang("router"), hold_s=(2.0, 14.0)),
)
# fmt: on
FAULTS = {one.name: one for one in _FAULTS}
