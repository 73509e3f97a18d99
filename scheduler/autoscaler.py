"""Run autoscaling as a task of the scheduler: observe, decide if it is its turn, and give the orders.

Of several schedulers over one store, the one that holds the store's lease decides. Its fencing number goes
with every order: the store, workers and fleets refuse an order with a lower one than they have seen. While
the store is unreachable, or a scheduler may not know all workers, nobody decides and nothing changes.

A step costs one fleet view, which placements need anyway, one read of the reports (some 130 numbers per
router), and the arithmetic.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Mapping

from baton.autoscale.controller import Controller, Decision
from baton.autoscale.goals import Goals
from baton.autoscale.seen import Member, Seen
from baton.protos import scheduler_pb2 as pb
from baton.scheduler.autoscale_metrics import AutoscaleMetrics
from baton.scheduler.booking import usable_blocks
from baton.scheduler.flip import set_role
from baton.scheduler.members import Members
from baton.scheduler.roster import Roster
from baton.scheduler.settling import Settling
from baton.scheduler.store import Store
from baton.scheduler.types import FleetView, Told, WorkerRecord, name_of

LEASE_STEPS = 3  # steps the deciding scheduler may miss before another takes over
TOLD_S = 10.0  # s; a router or fleet silent for this long is gone

log = logging.getLogger(__name__)


class Autoscaler:
    """Autoscale for one scheduler. `run` is its task."""

    def __init__(
        self,
        goals: Goals,
        store: Store,
        roster: Roster,
        members: Members,
        *,
        settling: Settling,
        metrics: AutoscaleMetrics,
    ) -> None:
        self._goals = goals
        self._store = store
        self._roster = roster
        self._members = members
        self._settling = settling
        self._metrics = metrics
        self._name = uuid.uuid4().hex
        self._fence = 0  # fencing number; 0 while this scheduler does not decide
        self._controller = Controller(goals)
        self._said = ""

    async def run(self) -> None:
        """Decide repeatedly, while it is this scheduler's turn."""
        while True:
            await asyncio.sleep(self._goals.interval_s)
            # Workers this scheduler alone does not hear from may be healthy, and must not be ordered away.
            if self._settling or not self._members.hears_all or not await self._lead():
                continue
            view = self._roster.view()
            told = await self._store.told()
            began = time.perf_counter()
            # Run in a thread: at 1,000 workers it takes longer than a placement should wait.
            decision = await asyncio.to_thread(self._decide, view, told)
            self._metrics.decided(decision, time.perf_counter() - began)
            self._say(decision)
            if self._goals.mode == "on":
                await self._give(decision, view)

    def _decide(self, view: FleetView, told: Told) -> Decision:
        return self._controller.step(seen(view, told, time.monotonic()))

    async def _lead(self) -> bool:
        """Return whether this scheduler decides. When it takes over, it starts with no history."""
        fence = await self._store.lead(self._name, LEASE_STEPS * self._goals.interval_s)
        if fence and fence != self._fence:
            log.info("this scheduler decides on the numbers of workers, with fence %d", fence)
            self._controller = Controller(self._goals)
        self._fence = fence
        self._metrics.leads.set(bool(fence))
        return bool(fence)

    async def _give(self, decision: Decision, view: FleetView) -> None:
        """Carry out the orders: call workers to change roles, tell fleets everything else."""
        if decision.changed:
            orders = {fleet: self._orders(ordered) for fleet, ordered in decision.plan.items()}
            if not await self._store.order(self._fence, orders):
                log.warning("another scheduler decides by now: these orders are dropped")
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

    def _say(self, decision: Decision) -> None:
        """Log what changed: the orders, or the advice in advise mode."""
        if self._goals.mode == "on":
            if decision.orders:
                log.warning("%s -> %s: %s", decision.present, decision.wanted, decision.orders)
            return
        advice = f"{decision.wanted} would do, {decision.present} are there"
        if advice != self._said:
            log.warning("advice: %s%s", advice, f": {decision.orders}" if decision.orders else "")
            self._said = advice


def seen(view: FleetView, told: Told, at: float) -> Seen:
    """Return everything a decision is based on; `at` is time.monotonic, seconds."""
    sides = (pb.ROLE_PREFILL, pb.ROLE_DECODE)
    members = [_member(one) for one in view.workers.values() if one.role in sides]
    return Seen(
        at,
        members,
        routers={key: pb.RouterLoad.FromString(raw) for key, raw in told.routers.items()},
        places={key: pb.OrdersRequest.FromString(raw).places for key, raw in told.fleets.items()},
        plan={key: _plan(raw) for key, raw in told.orders.items()},
    )


def _member(one: WorkerRecord) -> Member:
    load = one.load or pb.WorkerLoad()
    return Member(
        worker_id=one.worker_id,
        name=name_of(one.identity),
        role=one.role,
        ready=one.placeable,
        leaving=one.drain_asked or one.state == pb.WORKER_STATE_DRAINING,
        flips=bool(one.capacity.compatibility_hash),
        load=load,
        queued_tokens=one.reserved.prompt_tokens,
        requests=one.reserved.requests,
        slots=_slots(one.capacity, load),
    )


def _slots(capacity: pb.Capacity, load: pb.WorkerLoad) -> int:
    """Return how many requests a worker can run: its batch, or fewer if the KV cache holds fewer."""
    usable = usable_blocks(capacity)
    used = usable - load.free_blocks
    by_cache = usable * load.running // used if load.running and used > 0 else capacity.max_num_seqs
    return min(capacity.max_num_seqs, max(1, by_cache))


def _plan(raw: bytes) -> Mapping[str, pb.Role]:
    return {order.name: order.role for order in pb.OrdersReply.FromString(raw).orders}
