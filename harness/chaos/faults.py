"""The faults, by name. A new one is a function with `@fault`; plans.py says in which plans it happens.

A fault does its harm, holds it for the given time, and repairs it: afterwards `Site.whole` must become true
by itself. It uses only its `Act`.
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
from harness.chaos.site import Part, Site
from harness.scheduling import RedisServer

MOMENT_S = 5.0  # to wait for a stage
LONG_PROMPT = 200  # tokens: a handoff long enough to be hit
STREAMED = 8  # tokens that have come when an answer is well under way

ANY = "any"
QUEUE, PREFILL, HANDOFF, STREAM = "queue", "prefill", "handoff", "stream"
"""Stages of a request at a worker: it queues behind others; it is prefilled; its first token has come, so
that its KV is pinned or being pulled; its later tokens come."""


@dataclass
class Act:
    """A fault while it happens, and everything that it may use."""

    site: Site
    load: Load | None  # None: no requests are sent
    draw: random.Random
    stage: str
    hold_s: float
    census: Counter[str] = field(default_factory=Counter)  # "role stage" -> requests that it hit
    struck: float = 0.0  # time.monotonic: its moment had come; 0: it waits for none

    def pick(self, *kinds: str) -> Part:
        return self.draw.choice(self.site.of(*kinds))

    async def hold(self) -> None:
        await asyncio.sleep(self.hold_s)

    async def moment(self, victim: Part) -> None:
        """Wait for the wanted stage, for MOMENT_S at most; count which requests are at which stage."""
        deadline = time.monotonic() + MOMENT_S

        def mine(answer: Answer) -> bool:
            return victim.worker_id in self.workers(answer)

        if self.stage == HANDOFF:
            await self.answers.event(
                lambda answer: (
                    len(answer.arrivals) == 1 and len(answer.case.prompt) >= LONG_PROMPT and mine(answer)
                ),
                MOMENT_S,
            )
            await asyncio.sleep(self.draw.choice([0.0, 0.0, 0.001, 0.003, 0.006, 0.012]))
        elif self.stage == STREAM:
            await self.answers.event(lambda answer: len(answer.tokens) >= STREAMED and mine(answer), MOMENT_S)
        elif self.stage in (QUEUE, PREFILL):
            enough = 2 if self.stage == QUEUE else 1
            while self.prefilling(victim) < enough and time.monotonic() < deadline:  # noqa: ASYNC110 (no event)
                await asyncio.sleep(0.005)
        else:
            await asyncio.sleep(self.draw.uniform(0.0, 0.5))
        self.struck = time.monotonic()
        self.count(victim)

    def workers(self, answer: Answer) -> tuple[str, str]:
        """Return a request's prefill and decode worker, as the scheduler last said, else empty names."""
        for request_id, pair in self.site.live.items():
            if answer.request_id in request_id:
                return pair
        return "", ""

    def prefilling(self, victim: Part) -> int:
        """Return the requests that a worker is to prefill or prefills."""
        return sum(
            not answer.tokens and self.workers(answer)[0] == victim.worker_id
            for answer in self.answers.running.values()
        )

    def count(self, victim: Part) -> None:
        """Count the requests that are hit, by stage. Queued and prefilling are told apart by age alone."""
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
            elif len(answer.tokens) == 1:
                stage = HANDOFF
            else:
                stage = STREAM
            if stage == STREAM and victim.kind == "prefill":
                continue  # the request has left this worker
            self.census[f"{victim.kind} {stage}"] += 1

    @property
    def answers(self) -> Load:
        if self.load is None:
            raise RuntimeError("the plan sends no requests: its faults come at any stage")
        return self.load

    @property
    def redis(self) -> RedisServer:
        if self.site.redis is None:
            raise RuntimeError("the plan has no Redis")
        return self.site.redis


Fault = Callable[[Act], Awaitable[None]]


@dataclass(frozen=True)
class FaultEntry:
    """A registered fault."""

    name: str
    run: Fault
    stages: tuple[str, ...]
    hold_s: tuple[float, float]  # least and most
    about: str


FAULTS: dict[str, FaultEntry] = {}


def fault(*stages: str, hold_s: tuple[float, float] = (0.0, 0.0)) -> Callable[[Fault], Fault]:
    """Register a function under its name, with hyphens. The plan chooses stage and time from these."""

    def register(run: Fault) -> Fault:
        name = getattr(run, "__name__", "").replace("_", "-")
        if name in FAULTS:
            raise ValueError(f"there is a fault {name} already")
        about = (run.__doc__ or "").strip().splitlines()[0]
        FAULTS[name] = FaultEntry(name, run, stages or (ANY,), hold_s, about)
        return run

    return register


# -- workers

LONG = (4.0, 8.0)  # longer than a worker's lease of 3 s
SHORT = (0.3, 1.5)  # shorter


async def _kill(act: Act, *kinds: str) -> None:
    victim = act.pick(*kinds)
    await act.moment(victim)
    victim.kill()
    await act.hold()
    await victim.restart()


async def _hang(act: Act, *kinds: str) -> None:
    victim = act.pick(*kinds)
    await act.moment(victim)
    victim.hang()
    try:
        await act.hold()
    finally:
        victim.wake()


async def _drain(act: Act, *kinds: str) -> None:
    victim = act.pick(*kinds)
    await act.moment(victim)
    victim.drain()
    await _end_well(act, victim)
    await victim.restart()


async def _end_well(act: Act, victim: Part) -> None:
    code = await victim.ended()
    if code != 0:
        act.site.crashes.append(f"{victim.worker_id} ended with {code} instead of draining")


@fault(QUEUE, PREFILL, HANDOFF)
async def kill_prefill(act: Act) -> None:
    """Kill a prefill worker."""
    await _kill(act, "prefill")


@fault(QUEUE, PREFILL, HANDOFF, hold_s=LONG)
async def hang_prefill(act: Act) -> None:
    """Stop a prefill worker for longer than its lease."""
    await _hang(act, "prefill")


@fault(HANDOFF, STREAM)
async def kill_decode(act: Act) -> None:
    """Kill a decode worker."""
    await _kill(act, "decode")


@fault(HANDOFF, STREAM, hold_s=LONG)
async def hang_decode(act: Act) -> None:
    """Stop a decode worker for longer than its lease."""
    await _hang(act, "decode")


@fault(hold_s=SHORT)
async def pause_worker(act: Act) -> None:
    """Stop any worker for less than its lease."""
    await _hang(act, "prefill", "decode")


@fault()
async def kill_watcher(act: Act) -> None:
    """Kill the watcher of `baton up`, which tells when workers are ready; then a decode worker."""
    watcher, victim = act.pick("watcher"), act.pick("decode")
    await act.moment(victim)
    watcher.kill()
    await watcher.restart()
    victim.kill()
    await victim.restart()


@fault(HANDOFF)
async def kill_pair(act: Act) -> None:
    """Kill a prefill and a decode worker at once."""
    prefill, decode = act.pick("prefill"), act.pick("decode")
    await act.moment(prefill)
    prefill.kill()
    decode.kill()
    await prefill.restart()
    await decode.restart()


@fault()
async def drain_prefill(act: Act) -> None:
    """Terminate a prefill worker, and start another one."""
    await _drain(act, "prefill")


@fault()
async def drain_decode(act: Act) -> None:
    """Terminate a decode worker, and start another one."""
    await _drain(act, "decode")


@fault()
async def rolling_restart(act: Act) -> None:
    """Terminate all workers, one after the other, each replaced before the next."""
    for victim in list(act.site.workers):
        act.count(victim)
        victim.drain()
        await _end_well(act, victim)
        await victim.restart()
        await act.site.whole(60.0)


@fault(hold_s=SHORT)
async def operator_drain(act: Act) -> None:
    """Run `baton drain` on a worker: started again it takes nothing until `baton undrain`."""
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
    """Check for the time of the fault that a worker takes nothing."""
    until = time.monotonic() + act.hold_s
    while time.monotonic() < until:
        one = act.site.status(victim)
        if one is not None and (one.reserved_requests or one.load.running or one.load.waiting):
            raise AssertionError(
                f"{victim.worker_id} is drained, and was given {one.reserved_requests} requests"
            )
        await asyncio.sleep(0.02)


ROLES = {"prefill": pb.ROLE_PREFILL, "decode": pb.ROLE_DECODE, "mixed": pb.ROLE_MIXED}


@fault(hold_s=(0.0, 0.5))
async def flip_role(act: Act) -> None:
    """Run `baton role` on a worker at work. The next flip starts from its new role."""
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


# -- handoffs


@fault(hold_s=(4.0, 8.0))
async def corrupt_handoffs(act: Act) -> None:
    """Flip a bit in each save of a prefill worker that waits to be pulled, as soon as it is complete."""
    until = time.monotonic() + act.hold_s
    seen: set[int] = set()
    size = record_bytes()
    while time.monotonic() < until:
        for reader in act.site.of("prefill"):
            act.census["saves corrupted"] += corrupt(reader.pid, act.draw, seen, size)
        await asyncio.sleep(0.002)


# -- network


@fault(hold_s=LONG)
async def drop_network(act: Act) -> None:
    """Drop all traffic of a worker for longer than its lease, with its connections open."""
    await _disturb(act, drop=True)


@fault(hold_s=SHORT)
async def interrupt_network(act: Act) -> None:
    """Drop all traffic of a worker for less than its lease, with its connections open."""
    await _disturb(act, drop=True)


@fault(hold_s=LONG)
async def delay_network(act: Act) -> None:
    """Delay all traffic of a worker by 200 ms."""
    await _disturb(act, drop=False)


async def _disturb(act: Act, *, drop: bool) -> None:
    victim = act.pick("prefill", "decode")
    if victim.proxy is None:
        raise RuntimeError("the plan has no network of its own")
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


# -- scheduler


@fault()
async def kill_scheduler(act: Act) -> None:
    """Kill a scheduler, and start another one at once."""
    await _kill(act, "scheduler")


@fault(hold_s=LONG)
async def lose_scheduler(act: Act) -> None:
    """Kill a scheduler, and start another one only later."""
    await _kill(act, "scheduler")


@fault(hold_s=LONG)
async def hang_scheduler(act: Act) -> None:
    """Stop a scheduler for longer than workers' leases."""
    await _hang(act, "scheduler")


@fault(hold_s=LONG)
async def lose_schedulers(act: Act) -> None:
    """Kill all schedulers at once, and start others only later: routers place alone."""
    lost = act.site.of("scheduler")
    for scheduler in lost:
        scheduler.kill()
    await act.hold()
    for scheduler in lost:
        await scheduler.restart()


@fault()
async def drain_scheduler(act: Act) -> None:
    """Terminate a scheduler, and start another one."""
    await _drain(act, "scheduler")


@fault(hold_s=LONG)
async def kill_scheduler_and_decode(act: Act) -> None:
    """Kill a scheduler, then a decode worker while no scheduler answers."""
    scheduler, victim = act.pick("scheduler"), act.pick("decode")
    scheduler.kill()
    await act.moment(victim)
    victim.kill()
    await victim.restart()
    await act.hold()
    await scheduler.restart()


# -- Redis


@fault(hold_s=LONG)
async def kill_redis(act: Act) -> None:
    """Kill Redis, which comes back with what it had written to disk."""
    await act.moment(act.pick("scheduler"))
    act.redis.stop()
    await act.hold()
    await asyncio.to_thread(act.redis.start)


@fault(hold_s=LONG)
async def empty_redis(act: Act) -> None:
    """Kill Redis, which comes back empty."""
    await act.moment(act.pick("scheduler"))
    act.redis.stop()
    shutil.rmtree(act.redis.folder / "appendonlydir", ignore_errors=True)
    await act.hold()
    await asyncio.to_thread(act.redis.start)


@fault(hold_s=LONG)
async def hang_redis(act: Act) -> None:
    """Stop Redis."""
    await act.moment(act.pick("scheduler"))
    act.redis.hang()
    try:
        await act.hold()
    finally:
        act.redis.wake()


@fault(hold_s=LONG)
async def slow_redis(act: Act) -> None:
    """Stop Redis for 0.3 s again and again."""
    until = time.monotonic() + act.hold_s
    while time.monotonic() < until:
        act.redis.hang()
        await asyncio.sleep(0.3)
        act.redis.wake()
        await asyncio.sleep(0.3)


@fault(hold_s=LONG)
async def fill_redis(act: Act) -> None:
    """Leave Redis no memory: it refuses writes."""
    async with Redis.from_url(act.redis.url) as admin:
        await admin.config_set("maxmemory", "1")
        await act.hold()
        await admin.config_set("maxmemory", "0")


@fault(hold_s=LONG)
async def change_password(act: Act) -> None:
    """Change the password of Redis for a while, and close all its connections."""
    async with Redis.from_url(act.redis.url) as admin:
        await admin.config_set("requirepass", "another")
        await admin.client_kill_filter(_type="normal", skipme=True)
        await act.hold()
        await admin.config_set("requirepass", "")


@fault(hold_s=LONG)
async def kill_redis_and_scheduler(act: Act) -> None:
    """Kill Redis and a scheduler at once; Redis is back first."""
    scheduler = act.pick("scheduler")
    await act.moment(scheduler)
    act.redis.stop()
    scheduler.kill()
    await act.hold()
    await asyncio.to_thread(act.redis.start)
    await scheduler.restart()


@fault(hold_s=LONG)
async def start_scheduler_without_redis(act: Act) -> None:
    """Kill Redis and a scheduler at once; the scheduler is back first, and Redis comes back empty."""
    scheduler = act.pick("scheduler")
    await act.moment(scheduler)
    act.redis.stop()
    scheduler.kill()
    shutil.rmtree(act.redis.folder / "appendonlydir", ignore_errors=True)
    await scheduler.restart()
    await act.hold()
    await asyncio.to_thread(act.redis.start)


# -- router


@fault(hold_s=(0.5, 2.0))
async def kill_router(act: Act) -> None:
    """Kill one of several routers: its own connections break, the others' do not."""
    await _kill(act, "router")


@fault()
async def drain_router(act: Act) -> None:
    """Terminate one of several routers: it ends its streams, and the others take new requests."""
    await _drain(act, "router")


@fault(hold_s=(2.0, 14.0))
async def hang_router(act: Act) -> None:
    """Stop one of several routers, also for longer than workers and schedulers wait for it."""
    await _hang(act, "router")
