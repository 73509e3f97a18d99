"""Autoscaling and rebalancing as a task of the scheduler: observe the load, decide, and give orders.

The scheduler that holds the store's lease decides. Workers and fleets refuse a fencing number below the
highest that they have seen. While the store is unreachable, or the scheduler may not know all workers,
nothing changes.

Without goals, a worker changes its role when one side is overloaded and the other has a worker to spare. A
side's pressure is its work relative to its capacity: queued prompt tokens over the token budget of a step, or
requests over the batch size (or KV blocks in use). Requests only booked on a decode worker do not count. A
worker or gang changes sides once one side's pressure has been high for `after_s`, if the other side would be
at ease without that worker and would have room for its bookings. After a change, no role changes for
`PAUSE` * `after_s`.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from baton.autoscale.controller import Controller, Decision
from baton.autoscale.goals import Goals
from baton.autoscale.orders import SCALED
from baton.autoscale.seen import Member, Seen
from baton.protos import scheduler_pb2 as pb
from baton.scheduler.ask import ROLE_TIMEOUT_S, set_role
from baton.scheduler.booking import usable_blocks
from baton.scheduler.members import Members
from baton.scheduler.metrics import Metrics, role_of
from baton.scheduler.roster import Roster, Settling
from baton.scheduler.store import Store
from baton.scheduler.types import FleetView, Told, WorkerRecord, place_of

HIGH_PREFILL = 2.0  # steps' worth of queued prompts per prefill worker
HIGH_DECODE = 0.9  # share of the batch slots or of the KV blocks in use
EASE_PREFILL = 0.5
EASE_DECODE = 0.6
PAUSE = 3.0  # multiple of `after_s`


@dataclass(frozen=True, slots=True)
class Flip:
    """A change that is due: `worker`, with its gang, should take `role`."""

    worker: WorkerRecord
    role: pb.Role
    why: str


@dataclass(frozen=True, slots=True)
class _Side:
    role: pb.Role
    units: list[list[WorkerRecord]]  # workers alone, and gangs

    @property
    def workers(self) -> list[WorkerRecord]:
        return [one for unit in self.units for one in unit]

    @property
    def idlest(self) -> list[WorkerRecord]:
        return min(
            self.units,
            key=lambda unit: (
                sum(one.reserved.requests for one in unit),
                sum(one.reserved.prompt_tokens for one in unit),
            ),
        )

    def pressure(self, fewer: int = 0) -> float:
        """Return the pressure if this side lost `fewer` workers."""
        workers = self.workers
        share = len(workers) / (len(workers) - fewer)
        return share * (_queued(workers) if self.role == pb.ROLE_PREFILL else _used(workers))

    @property
    def high(self) -> bool:
        return self.pressure() >= (HIGH_PREFILL if self.role == pb.ROLE_PREFILL else HIGH_DECODE)

    @property
    def can_spare(self) -> bool:
        if len(self.units) < 2:
            return False
        ease = EASE_PREFILL if self.role == pb.ROLE_PREFILL else EASE_DECODE
        workers, fewer = self.workers, len(self.idlest)
        room = 1 - fewer / len(workers)
        return self.pressure(fewer) <= ease and _booked(workers) <= room


class Balance:
    def __init__(self, after_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._after_s = after_s
        self._clock = clock
        self._since: dict[pb.Role, float] = {}  # role that is short of workers -> since when
        self._pause_until = 0.0

    def start_over(self) -> None:
        """Forget how long sides were under pressure, because nobody was watching. The pause continues."""
        self._since.clear()

    def look(self, view: FleetView) -> Flip | None:
        now = self._clock()
        prefills, decodes = (_side(view, role) for role in (pb.ROLE_PREFILL, pb.ROLE_DECODE))
        for short, other in ((prefills, decodes), (decodes, prefills)):
            if not (short.units and short.high and other.can_spare):
                self._since.pop(short.role, None)
                continue
            if now < max(self._since.setdefault(short.role, now) + self._after_s, self._pause_until):
                continue
            self._since.clear()
            self._pause_until = now + PAUSE * self._after_s
            why = (
                f"the {role_of(short.role)} side was at {short.pressure():.1f} for {self._after_s:g} s, "
                f"the other one is at {other.pressure():.1f}"
            )
            return Flip(other.idlest[0], short.role, why)
        return None


def _side(view: FleetView, role: pb.Role) -> _Side:
    # A worker that cannot hand over KV cannot change sides.
    able = [
        unit
        for unit in view.units()
        if unit[0].placeable and all(one.role == role and one.capacity.compatibility_hash for one in unit)
    ]
    return _Side(role, able)


def _queued(workers: list[WorkerRecord]) -> float:
    budget = sum(one.capacity.max_num_batched_tokens for one in workers)
    return sum(one.reserved.prompt_tokens for one in workers) / max(1, budget)


def _used(workers: list[WorkerRecord]) -> float:
    heard = [one.load for one in workers if one.load is not None]
    requests = sum(load.running + load.waiting for load in heard)
    blocks = sum(
        usable_blocks(one.capacity) - one.load.free_blocks for one in workers if one.load is not None
    )
    return max(requests / max(1, sum(one.capacity.max_num_seqs for one in workers)), blocks / _cache(workers))


def _booked(workers: list[WorkerRecord]) -> float:
    return sum(one.reserved.blocks for one in workers) / _cache(workers)


def _cache(workers: list[WorkerRecord]) -> int:
    return max(1, sum(usable_blocks(one.capacity) for one in workers))


BALANCE_AFTER_S = 5.0  # s for which one side lacks workers, and the other can spare one, before it changes
BALANCE_S = 1.5  # s between decisions without goals
LEASE_STEPS = 3  # steps the deciding scheduler may miss before another takes over
TOLD_S = 10.0  # s; a router or fleet silent for this long counts as dead

log = logging.getLogger(__name__)


class Autoscaler:
    def __init__(
        self,
        goals: Goals | None,
        rebalance_after_s: float | None,
        store: Store,
        roster: Roster,
        members: Members,
        *,
        settling: Settling,
        metrics: Metrics,
    ) -> None:
        self._goals = goals
        self._store = store
        self._roster = roster
        self._members = members
        self._settling = settling
        self._role_changes, self._metrics = metrics.role_changes, metrics.autoscale
        self._interval_s = goals.interval_s if goals else BALANCE_S
        self._name = uuid.uuid4().hex
        self._fence = 0  # fencing number; 0 while this scheduler does not decide
        self._controller: Controller | None = None
        self._balance = Balance(rebalance_after_s) if rebalance_after_s else None
        self._said = ""

    async def run(self) -> None:
        """Decide at intervals while this scheduler holds the lease."""
        while True:
            await asyncio.sleep(self._interval_s)
            # A worker that only this scheduler has lost may be healthy, and must not be replaced.
            if self._settling or not self._members.hears_all or not await self._lead():
                continue
            if self._goals is None or self._goals.mode == "on":
                await self._unite(self._roster.view())
            view = self._roster.view()
            if self._balance:
                await self._rebalance(self._balance, view)
            if self._controller:
                await self._scale(self._controller, view)

    async def _lead(self) -> bool:
        # A step may also take as long as a worker's change of role.
        lease_s = max(LEASE_STEPS * self._interval_s, ROLE_TIMEOUT_S + 2 * self._interval_s)
        fence = await self._store.lead(self._name, lease_s)
        if fence and fence != self._fence:
            log.info("this scheduler decides on workers' numbers and roles, with fence %d", fence)
            self._controller = Controller(self._goals) if self._goals else None
            if self._balance:
                self._balance.start_over()
        self._fence = fence
        self._metrics.leads.set(bool(fence))
        return bool(fence)

    async def _unite(self, view: FleetView) -> None:
        """Give all workers of a gang the same role: one may have started or failed during a change."""
        divided = [
            unit[0]
            for unit in view.units()
            if unit[0].placeable and any(one.role != unit[0].role for one in unit)
        ]
        problems = await asyncio.gather(*(set_role(one, one.role, self._fence) for one in divided))
        for problem in filter(None, problems):
            log.warning("a gang keeps several roles: %s", problem)

    async def _rebalance(self, balance: Balance, view: FleetView) -> None:
        flip = balance.look(view)
        if not flip:
            return
        if problem := await set_role(flip.worker, flip.role, self._fence):
            log.warning("no change of role: %s", problem)
            return
        self._role_changes.labels("balance").inc()
        log.warning("worker %s changes to %s: %s", flip.worker.worker_id, role_of(flip.role), flip.why)

    async def _scale(self, controller: Controller, view: FleetView) -> None:
        told = await self._store.told()
        began = time.perf_counter()
        # In a thread: with 1,000 workers, a step takes longer than a placement should wait.
        decision = await asyncio.to_thread(lambda: controller.step(seen(view, told, time.monotonic())))
        self._metrics.decided(decision, time.perf_counter() - began)
        on = controller.goals.mode == "on"
        self._say(decision, on)
        if on:
            await self._give(decision, view)

    async def _give(self, decision: Decision, view: FleetView) -> None:
        if decision.changed:
            orders = {fleet: self._orders(ordered) for fleet, ordered in decision.plan.items()}
            if not await self._store.order(self._fence, orders):
                log.warning("another scheduler decides now: these orders are dropped")
                return
            self._metrics.ordered("start", len(decision.starts))
            self._metrics.ordered("stop", len(decision.stops))
        if not decision.flips:
            return
        problems = await asyncio.gather(
            *(set_role(view.workers[one.worker_id], role, self._fence) for one, role in decision.flips)
        )
        for problem in filter(None, problems):
            log.warning("no change of role: %s", problem)
        self._metrics.ordered("flip", sum(not problem for problem in problems))

    def _orders(self, ordered: Mapping[str, pb.Role]) -> bytes:
        orders = [pb.Order(name=name, role=role) for name, role in ordered.items()]
        return pb.OrdersReply(fence=self._fence, orders=orders).SerializeToString()

    def _say(self, decision: Decision, on: bool) -> None:
        if on:
            if decision.orders:
                log.warning("%s -> %s: %s", decision.present, decision.wanted, decision.orders)
            return
        advice = f"{decision.wanted} would be enough, {decision.present} are running"
        if advice != self._said:
            log.warning("advice: %s%s", advice, f": {decision.orders}" if decision.orders else "")
            self._said = advice


def seen(view: FleetView, told: Told, at: float) -> Seen:
    """Return the input of a decision; `at` is `time.monotonic`."""
    members = [_member(unit) for unit in view.units() if unit[0].role in SCALED]
    return Seen(
        at,
        members,
        routers={key: pb.RouterLoad.FromString(raw) for key, raw in told.routers.items()},
        places={key: pb.OrdersRequest.FromString(raw).places for key, raw in told.fleets.items()},
        plan={
            key: {one.name: one.role for one in pb.OrdersReply.FromString(raw).orders}
            for key, raw in told.orders.items()
        },
    )


def _member(unit: list[WorkerRecord]) -> Member:
    first = unit[0]
    loads = [one.load or pb.WorkerLoad() for one in unit]
    return Member(
        worker_id=first.worker_id,
        name=place_of(first.identity),
        role=first.role,
        ready=first.placeable,
        leaving=any(one.drain_asked or one.state == pb.WORKER_STATE_DRAINING for one in unit),
        flips=all(one.capacity.compatibility_hash for one in unit),
        load=loads[0] if len(loads) == 1 else _together(loads),
        queued_tokens=sum(one.reserved.prompt_tokens for one in unit),
        requests=sum(one.reserved.requests for one in unit),
        slots=sum(_slots(one.capacity, load) for one, load in zip(unit, loads, strict=True)),
    )


def _together(loads: list[pb.WorkerLoad]) -> pb.WorkerLoad:
    counts = [one.counts for one in loads]
    return pb.WorkerLoad(
        running=sum(one.running for one in loads),
        waiting=sum(one.waiting for one in loads),
        counts=pb.EngineCounts(
            computed_tokens=sum(one.computed_tokens for one in counts),
            prefix_hits=sum(one.prefix_hits for one in counts),
            output_tokens=sum(one.output_tokens for one in counts),
            request_s=sum(one.request_s for one in counts),
            # The mean, because the workers can compute at the same time.
            busy_s=sum(one.busy_s for one in counts) / len(counts),
        ),
    )


def _slots(capacity: pb.Capacity, load: pb.WorkerLoad) -> int:
    """Return how many requests a worker can run: its batch, or fewer if the KV cache holds fewer."""
    usable = usable_blocks(capacity)
    used = usable - load.free_blocks
    by_cache = usable * load.running // used if load.running and used > 0 else capacity.max_num_seqs
    return min(capacity.max_num_seqs, max(1, by_cache))
