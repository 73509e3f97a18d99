"""Placements at a steady rate, without engines.

Workers register, send heartbeats, and admit or refuse attempts. Routers place requests with a real router's
code, but call workers directly. Schedulers' sums are compared with the attempts on the workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import random
import time
from collections.abc import AsyncIterator
from dataclasses import replace

from prometheus_client import CollectorRegistry

from baton.protos import scheduler_pb2 as pb
from baton.scheduler.booking import blocks_for, usable_blocks
from baton.scheduler.client import Placement, SchedulerClient
from baton.scheduler.errors import NoCapacity, SchedulerUnavailable
from baton.scheduler.types import Booking
from baton.scheduler.worker_session import WorkerSession
from baton.services.config import PolicySettings, SchedulerSettings
from baton.services.engine.args import VLLM_VERSION
from baton.services.router.cluster import ClusterView
from baton.services.router.errors import NotAdmitted, Why
from baton.services.router.metrics import RouterMetrics
from baton.services.router.placement import Placements, need_of
from baton.services.router.recovery import backoff_s
from baton.services.router.state import RequestState
from baton.tasks import spawn, stop
from harness.chaos.placing_judge import LAG_S, Placed, Workers
from harness.chaos.site import Site
from harness.chaos.victims import Part
from harness.scheduling import capacity, identity

WORKERS = 20  # half of them prefill
ROUTERS = 2
# 500 requests/s use half of this, so a scheduler that loses a second reaches the bounds.
CAPACITY = capacity(max_num_seqs=24, num_blocks=1_201, max_model_len=4_096)
PROMPT = (100, 900)  # tokens
ANSWER = (16, 300)
READ_S = (0.005, 0.03)  # duration of a prefill
LIFE_S = (0.05, 0.5)
LONG_LIFE_S = (4.0, 6.0)  # long enough for all schedulers to be told
LONG = 0.01  # share of attempts with LONG_LIFE_S
RETRIED = 0.05  # share of requests that lose their worker once
LATE = 0.02  # share of placements that are requested twice, with the same epoch
TICK_S = 0.01
TOLD_S = 2.5  # a restarted scheduler knows everything again after this time
STALL_S = 0.3  # longest stall of this process that lets reports arrive within LAG_S
TRIES = 2  # refusals by workers before an attempt counts as refused
MOST_OPEN = 8_000  # requests in flight; with more, the schedulers do not keep up
START_S = 20.0
END_S = 60.0  # timeout for the end of the last requests


@contextlib.asynccontextmanager
async def registered(site: Site) -> AsyncIterator[None]:
    async with contextlib.AsyncExitStack() as stack:
        site.guests |= await register(stack, site.scheduler_address, WORKERS, CAPACITY)
        await site.whole(START_S)
        try:
            yield
        finally:
            site.guests.clear()


async def register(
    stack: contextlib.AsyncExitStack, schedulers: str, count: int, capacity: pb.Capacity
) -> set[str]:
    """Register ready workers, each with its own connection, until the stack closes. Return their ids."""
    names = set()
    for number in range(count):
        role = pb.ROLE_PREFILL if number % 2 else pb.ROLE_DECODE
        one = identity(f"worker-{number}", role, vllm=VLLM_VERSION)
        client = await stack.enter_async_context(SchedulerClient(schedulers))
        load = pb.WorkerLoad(free_blocks=usable_blocks(capacity))
        session = WorkerSession(client, one, lambda load=load: load)  # type: ignore[misc]
        stack.push_async_callback(session.close)
        await session.start(START_S)
        await session.ready(capacity)
        names.add(one.worker_id)
    return names


class _Router:
    def __init__(self, address: str, name: str, lease_s: float) -> None:
        self.name = name
        self.client = SchedulerClient(address, router_id=name, policy=PolicySettings())
        self.placements = Placements(self.client, RouterMetrics(CollectorRegistry()))
        self.view = ClusterView(self.client, lease_s)


class Placing:
    """Requests at a steady rate, whatever happens to earlier ones. `placed` collects the figures."""

    def __init__(self, site: Site, placed: Placed, seed: str) -> None:
        self.over: list[tuple[float, float]] = []  # start and end of placements; time.monotonic
        self._site = site
        self._placed = placed
        self._draw = random.Random(seed)
        self._workers = Workers(CAPACITY, SchedulerSettings())
        self._stalled_at = 0.0  # last stall of this process; time.monotonic
        self._known: dict[str, tuple[int, float]] = {}  # scheduler -> process id, and when it began to answer
        self._pairs: dict[tuple[str, int], tuple[str, str]] = {}  # attempt -> prefill and decode worker
        self._open: set[asyncio.Task[None]] = set()
        self._routers: list[_Router] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._asking: asyncio.Task[None] | None = None

    @property
    def progress(self) -> str:
        return f"{self._placed.placed} placed, {self._placed.alone} alone, {len(self._open)} under way"

    async def __aenter__(self) -> Placing:
        lease_s = self._site.shape.lease_s
        for number in range(self._placed.routers):
            self._routers.append(_Router(self._site.scheduler_address, f"router-{number}", lease_s))
        for router in self._routers:
            await router.client.refresh()  # a router needs a first snapshot
        self._tasks = [spawn(router.view.watch(), router.name) for router in self._routers]
        self._tasks.append(spawn(self._watch(), "look at live attempts"))
        self._asking = spawn(self._ask(), "ask for placements")
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop sending requests and wait for the last ones."""
        if self._asking is not None:
            await stop(self._asking)
        if self._open:
            await asyncio.wait(self._open, timeout=END_S)
        for task in [*self._open, *self._tasks]:
            if task in self._open:
                self._placed.fail("END", f"a request did not end within {END_S:g} s")
            await stop(task)
        for router in self._routers:
            await router.client.close()
            self._placed.dropped += router.client.reports.dropped
        self._placed.fullest = self._workers.fullest

    async def _ask(self) -> None:
        began = time.monotonic()
        for number in itertools.count():
            while number >= (time.monotonic() - began) * self._placed.rate:
                due = time.monotonic() + TICK_S
                await asyncio.sleep(TICK_S)
                if time.monotonic() - due > STALL_S:
                    self._stalled_at = time.monotonic()
            self._placed.requests += 1
            if len(self._open) >= MOST_OPEN:
                self._placed.fail("OPEN", f"{MOST_OPEN} requests are in flight")
                continue
            router = self._routers[number % len(self._routers)]
            prompt, answer = self._draw.randint(*PROMPT), self._draw.randint(*ANSWER)
            state = request(f"{router.name}-{number}", prompt, answer)
            task = asyncio.create_task(self._request(router, state))
            self._open.add(task)
            task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._open.discard(task)
        if not task.cancelled() and (error := task.exception()):
            self._placed.fail(type(error).__name__, f"{error}")

    async def _request(self, router: _Router, state: RequestState) -> None:
        if self._draw.random() < RETRIED:
            lost = await self._attempt(router, state, "retried")
            if lost is None:
                return
            state.excluded.add(lost.decode.worker_id)
        await self._attempt(router, state, "stop")

    async def _attempt(self, router: _Router, state: RequestState, outcome: str) -> Placement | None:
        """Run an attempt from its placement to its end. Return None if no worker admitted it."""
        for tries in range(TRIES):
            await asyncio.sleep(backoff_s(2 * tries))
            placement = await self._place(router, state)
            if placement is None:
                return None
            stay, full = self._workers.take(booking_of(router.name, state, placement), time.monotonic())
            if not full:
                break
            self._placed.sent_back += 1
            self._placed.sent_back_alone += placement.from_snapshot
            state.excluded.add(full)
            router.placements.finished(state, placement.attempt, "retried")
        else:
            self._placed.refused += 1
            return None
        until_read = self._draw.uniform(*READ_S)
        rest_s = self._draw.uniform(*(LONG_LIFE_S if self._draw.random() < LONG else LIFE_S)) - until_read
        if not placement.from_snapshot and self._draw.random() < LATE:
            await self._once_more(router, state, placement)
        await asyncio.sleep(until_read)
        self._workers.prefilled(stay, time.monotonic())
        router.placements.reports.prefilled(placement.attempt)
        await asyncio.sleep(rest_s)
        self._workers.end(stay, time.monotonic())
        router.placements.finished(state, placement.attempt, outcome)
        return placement

    async def _place(self, router: _Router, state: RequestState) -> Placement | None:
        began = time.monotonic()
        try:
            placement = await router.placements.place(state, set())
        except NotAdmitted as no:
            if no.why is Why.FULL:
                self._placed.refused += 1
            else:
                self._placed.fail(no.why, f"{state.request_id}{self._after_s()}: {no.message}")
            return None
        self.over.append((began, time.monotonic()))
        self._placed.placed += 1
        self._placed.alone += placement.from_snapshot
        attempt = placement.attempt
        self._pairs[attempt.request_id, attempt.epoch] = _pair(placement)
        return placement

    async def _once_more(self, router: _Router, state: RequestState, placement: Placement) -> None:
        """Place the same epoch again, like a call that was delivered twice. The scheduler must refuse.

        Only the scheduler that placed it must: another may not know of it yet, and no router asks both.
        """
        addresses = self._site.scheduler_address.split(",")
        asked = self._site.of("scheduler")[addresses.index(placement.scheduler)]
        if not self._told(asked) or router.client.home(router.name) != placement.scheduler:
            return
        self._placed.late += 1
        with contextlib.suppress(NoCapacity, SchedulerUnavailable):
            need = replace(need_of(state, router.name), attempt=placement.attempt)
            again = await router.client.place(need)
            where = f"{_pair(placement)}, then on {_pair(again)}"
            self._placed.place_twice(f"{again.attempt} was placed on {where}{self._after_s()}")

    def _after_s(self) -> str:
        return f", {time.monotonic() - self._placed.began_at:.1f} s after the start"

    async def _watch(self) -> None:
        """Compare schedulers' bookings with the routers' placements and with the workers' attempts."""
        while True:
            asked = time.monotonic()
            schedulers = self._site.of("scheduler")
            descriptions = dict(zip(schedulers, await self._site.describe_each(), strict=True))
            got = time.monotonic()
            self._note(descriptions)
            told = {part: one for part, one in descriptions.items() if one is not None and self._told(part)}
            for description in told.values():
                self._compare_pairs(description)
            await asyncio.sleep(LAG_S)
            stalled = self._stalled_at > asked - 2 * LAG_S  # a stall delays reports even without a fault
            for part, description in told.items():
                if self._told(part) and not stalled:  # the part is still the same process
                    unlike = self._workers.unlike(description, asked, got)
                    self._placed.compare(unlike, f"{part.name}{self._after_s()}")

    def _note(self, descriptions: dict[Part, pb.Description | None]) -> None:
        """Record when each scheduler began to answer."""
        for part, description in descriptions.items():
            known = self._known.get(part.name)
            if description is None:
                self._known.pop(part.name, None)
            elif known is None or known[0] != part.pid:
                self._known[part.name] = part.pid, time.monotonic()

    def _told(self, part: Part) -> bool:
        """Return whether a scheduler has been up long enough to know everything."""
        pid, since = self._known.get(part.name, (part.pid, math.inf))
        return pid == part.pid and not part.hung and time.monotonic() - since >= TOLD_S

    def _compare_pairs(self, description: pb.Description) -> None:
        for live in description.attempts:
            attempt = live.attempt.request_id, live.attempt.epoch
            booked = live.prefill_worker_id, live.decode_worker_id
            mine = self._pairs.get(attempt, booked)  # the router's placement may still be in flight
            if mine != booked:
                where = f"{mine} but is booked on {booked}"
                self._placed.place_twice(f"{attempt} was placed on {where}{self._after_s()}")


def _pair(placement: Placement) -> tuple[str, str]:
    return placement.prefill.worker_id if placement.prefill else "", placement.decode.worker_id


def request(request_id: str, prompt: int, answer: int) -> RequestState:
    """Return a router's state of a request."""
    return RequestState(
        request_id,
        "",
        b"",
        prompt_tokens=prompt,
        max_tokens=answer,
        max_model_len=CAPACITY.max_model_len,
        deadline=math.inf,
    )


def booking_of(
    router: str, state: RequestState, placement: Placement, capacity: pb.Capacity = CAPACITY
) -> Booking:
    need = need_of(state, router)
    blocks = blocks_for(need, capacity)
    return Booking(placement.attempt, router, *_pair(placement), need.prompt_tokens, blocks)
