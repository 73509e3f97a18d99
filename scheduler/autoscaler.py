"""Autoscaling and rebalancing as a task of the scheduler: observe the load, decide, and give orders.

The scheduler that holds the store's lease decides: `autoscale.controller` if there are goals, or else
`autoscale.balance`. Workers and fleets refuse a fencing number below the
highest that they have seen. While the store is unreachable, or the scheduler may not know all workers,
nothing changes.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Mapping, Sequence

from baton.autoscale.balance import Balance
from baton.autoscale.controller import Controller, Decision
from baton.autoscale.goals import Goals
from baton.autoscale.orders import SCALED
from baton.autoscale.seen import Member, Seen
from baton.enums import role_name
from baton.protos import scheduler_pb2 as pb
from baton.scheduler.ask import ROLE_TIMEOUT_S, set_role
from baton.scheduler.booking import usable_blocks
from baton.scheduler.members import Members
from baton.scheduler.metrics import Metrics
from baton.scheduler.roster import Roster, Settling
from baton.scheduler.store import Store
from baton.scheduler.types import FleetView, Told, WorkerRecord, place_of

BALANCE_AFTER_S = 5.0  # how long one side lacks workers that the other can spare before one changes
BALANCE_S = 1.5  # pause between decisions without goals
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
        flip = await asyncio.to_thread(lambda: balance.look(seen(view, Told(), time.monotonic())))
        if flip and await self._flip([(flip.member, flip.role)], view):
            self._role_changes.labels("balance").inc()
            log.warning("worker %s changes to %s: %s", flip.member.worker_id, role_name(flip.role), flip.why)

    async def _flip(self, flips: Sequence[tuple[Member, pb.Role]], view: FleetView) -> int:
        """Change roles; return how many changes succeeded."""
        problems = await asyncio.gather(
            *(set_role(view.workers[one.worker_id], role, self._fence) for one, role in flips)
        )
        for problem in filter(None, problems):
            log.warning("no change of role: %s", problem)
        return sum(not problem for problem in problems)

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
        self._metrics.ordered("flip", await self._flip(decision.flips, view))

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
        step_tokens=sum(one.capacity.max_num_batched_tokens for one in unit),
        batch=sum(one.capacity.max_num_seqs for one in unit),
        blocks=sum(usable_blocks(one.capacity) for one in unit),
        used=sum(usable_blocks(one.capacity) - one.load.free_blocks for one in unit if one.load is not None),
        booked=sum(one.reserved.blocks for one in unit),
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
