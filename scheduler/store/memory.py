"""The state in this process's memory. It is lost with the process; workers then register again."""

from __future__ import annotations

import math
import time
import uuid
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from baton.attempts import EPOCH_KEEP_S, Attempt
from baton.protos import scheduler_pb2 as pb
from baton.scheduler.errors import StaleWorker
from baton.scheduler.keys import HANDOFFS_KEPT
from baton.scheduler.store.base import TOLD_KINDS, Store
from baton.scheduler.store.ledger import Ledger, Live, Past, forget
from baton.scheduler.types import (
    Booking,
    Claim,
    Deployment,
    FleetView,
    Heard,
    History,
    Known,
    ReportResult,
    Reserved,
    ReserveOutcome,
    ReserveResult,
    RouterReport,
    State,
    Told,
    WorkerRecord,
    attempt_to_wire,
    drained_of,
    name_of,
)

Clock = Callable[[], float]  # seconds, never going back


@dataclass(slots=True)
class _Worker:
    identity: pb.WorkerIdentity
    state: pb.WorkerState
    load: pb.WorkerLoad | None
    lease_until: float
    epoch: int  # of its last message


class MemoryStore(Store):
    """A store in memory. Every method runs without giving up the event loop: that makes it atomic."""

    def __init__(self, topic: str, clock: Clock = time.monotonic) -> None:
        self.name = "memory"
        self._topic = topic
        self._clock = clock
        self._workers: dict[str, _Worker] = {}
        self._gone: OrderedDict[str, Past] = OrderedDict()  # by worker id; none of them is registered
        self._deployment: Deployment | None = None
        self._drains: dict[str, int] = {}  # name -> as in `State.drains`
        self._ledger = Ledger()
        self._turns: dict[str, float] = {}
        self._told: dict[tuple[str, str], tuple[float, bytes]] = {}  # (kind, who) -> lease's end, message
        self._leader = ("", 0, 0.0)  # who, fence, lease's end
        self._orders: dict[str, bytes] = {}  # by fleet
        # The view's records are kept, and brought up to date where something changed: a view is asked for
        # some 50 times a second, and to make all of it anew would be most of the work at 1,000 workers.
        self._records: dict[str, WorkerRecord] = {}
        self._by_roles: dict[tuple[int, ...], list[WorkerRecord]] = {}
        self._roster_changed = False
        self._beaten: set[str] = set()  # workers whose heartbeats came since the last view
        self._none_ends_before = 0.0  # no worker's lease does
        self._handoffs: deque[tuple[pb.PastHandoff, float]] = deque(maxlen=HANDOFFS_KEPT)

    async def view(self) -> FleetView:
        now = self._clock()
        expired = self._sweep(now)
        self._refresh(now)
        drained = drained_of(self._drains)
        live = len(self._ledger.live)
        return FleetView(self._records, live, expired, self.generation, drained, self._by_roles)

    async def reserve(self, claim: Claim, lease_s: float) -> ReserveResult:
        now = self._clock()
        expired = self._sweep(now)
        booking = claim.booking
        request_id = booking.attempt.request_id
        last, _ = self._ledger.last(request_id)
        if booking.attempt.epoch <= last:
            return ReserveResult(ReserveOutcome.STALE, str(last), expired)
        if request_id in self._ledger.live:
            self._ledger.release(request_id, now, over=True)
        for worker_id in booking.worker_ids:
            worker = self._workers.get(worker_id)
            if worker is None or not self._record(worker, now).placeable:
                return ReserveResult(ReserveOutcome.GONE, worker_id, expired)
        queued = self._ledger.reserved(booking.prompt_worker_id).prompt_tokens
        if queued and queued + booking.prompt_tokens > claim.max_prompt_tokens:
            return ReserveResult(ReserveOutcome.FULL, booking.prompt_worker_id, expired)
        decode = self._ledger.reserved(booking.decode_id)
        if decode.requests >= claim.max_requests or decode.blocks + booking.blocks > claim.max_blocks:
            return ReserveResult(ReserveOutcome.FULL, booking.decode_id, expired)
        self._ledger.book(booking, now + lease_s)
        return ReserveResult(ReserveOutcome.BOOKED, expired=expired)

    def holds(self, booking: Booking) -> bool:
        """Return whether this very booking is a live one. A router uses each epoch once."""
        live = self._ledger.find(booking.attempt)
        return live is not None and live.booking.worker_ids == booking.worker_ids

    async def report(self, report: RouterReport, lease_s: float) -> ReportResult:
        now = self._clock()
        result = ReportResult()
        for known in report.placed:
            self._count_stale(known.attempt, result)
            if not self._ledger.adopt(known, now + lease_s, now):
                result.fenced.append(known.attempt)
        for attempt in report.prefilled:
            self._count_stale(attempt, result)
            live = self._ledger.find(attempt)
            if live:
                self._ledger.end_prefill(live)
        for attempt, event in report.finished:
            self._count_stale(attempt, result)
            live = self._ledger.find(attempt)
            if live:
                self._ledger.release(attempt.request_id, now, over=True)
                self._handoffs.appendleft((_past(live.booking, event), now))
            else:  # it may be booked elsewhere, and be written back from there
                self._ledger.conclude(Known(attempt, over=True), now)
        for attempt in report.renewed:
            self._count_stale(attempt, result)
            live = self._ledger.find(attempt)
            if live:
                self._ledger.renew(live, now + lease_s)
            else:
                (result.fenced if self._ledger.fenced(attempt) else result.lost).append(attempt)
        for attempt, blocks in report.shared:
            self._count_stale(attempt, result)
            live = self._ledger.find(attempt)
            if live:
                self._ledger.share(live, blocks)
        return result

    async def register(self, identity: pb.WorkerIdentity, state: pb.WorkerState, lease_s: float) -> str:
        now = self._clock()
        self._sweep(now)
        last = self._epoch_of(identity.worker_id)
        if identity.epoch < last:
            raise StaleWorker(identity.worker_id, identity.epoch, last)
        newcomer = Deployment.of(identity)
        others = self._workers.keys() - {identity.worker_id}
        if self._deployment and others:
            refusal = self._deployment.refusal(self._topic, newcomer)
            if refusal:
                return refusal
        else:
            self._deployment = newcomer
        known = self._workers.get(identity.worker_id)
        self._workers[identity.worker_id] = _Worker(
            identity=identity,
            state=state,
            load=known.load if known else None,
            lease_until=now + lease_s,
            epoch=identity.epoch,
        )
        self._joined(identity.worker_id, now + lease_s)
        return ""

    async def heartbeat(
        self, worker_id: str, state: pb.WorkerState, load: pb.WorkerLoad, lease_s: float, epoch: int = 0
    ) -> Heard:
        now = self._clock()
        if epoch < self._epoch_of(worker_id):
            return Heard(known=False, drain=False, stale=True)
        worker = self._workers.get(worker_id)
        if worker is None or worker.lease_until <= now:
            return Heard(known=False, drain=False)
        worker.state, worker.load, worker.lease_until, worker.epoch = state, load, now + lease_s, epoch
        self._beaten.add(worker_id)
        self._none_ends_before = min(self._none_ends_before, worker.lease_until)
        return Heard(known=True, drain=self._drained(worker))

    async def deregister(self, worker_id: str, epoch: int = 0) -> bool:
        if epoch < self._epoch_of(worker_id):
            return False
        if self._workers.pop(worker_id, None):
            self._gone[worker_id] = Past(epoch, self._clock() + EPOCH_KEEP_S, over=True)
            self._roster_changed = True
        return True

    async def drain(self, name: str, *, undo: bool = False) -> bool:
        count = self._drains.get(name, 0)
        if bool(count % 2) is not undo:
            return False
        self._drains[name] = count + 1
        self._roster_changed = True
        return True

    async def take_turn(self, what: str, for_s: float) -> bool:
        now = self._clock()
        if self._turns.get(what, now) > now:
            return False
        self._turns[what] = now + for_s
        return True

    async def tell(self, kind: str, who: str, message: bytes, lease_s: float) -> bytes:
        self._told[kind, who] = self._clock() + lease_s, message
        return self._orders.get(who, b"") if kind == "fleet" else b""

    async def lead(self, who: str, for_s: float) -> int:
        now = self._clock()
        leader, fence, until = self._leader
        if until > now and leader != who:
            return 0
        if until <= now:
            fence = max(fence + 1, int(1_000 * time.time()))
        self._leader = who, fence, now + for_s
        return fence

    async def told(self) -> Told:
        now = self._clock()
        self._told = {key: one for key, one in self._told.items() if one[0] > now}
        by_kind: dict[str, dict[str, bytes]] = {kind: {} for kind in TOLD_KINDS}
        for (kind, who), (_, message) in self._told.items():
            by_kind[kind][who] = message
        return Told(by_kind["router"], by_kind["fleet"], self._orders, by_kind["process"], by_kind["turns"])

    async def order(self, fence: int, orders: Mapping[str, bytes]) -> bool:
        if fence != self._leader[1] or self._leader[2] <= self._clock():
            return False
        self._orders = dict(orders)
        return True

    async def history(self, limit: int) -> History:
        now = self._clock()
        newest = sorted(self._ledger.live.values(), key=lambda live: live.lease_until, reverse=True)[:limit]
        handoffs: list[pb.PastHandoff] = []
        for past, ended in list(self._handoffs)[:limit]:
            aged = pb.PastHandoff()
            aged.CopyFrom(past)
            aged.age_s = now - ended
            handoffs.append(aged)
        return History([_live_message(live, now) for live in newest], handoffs)

    async def export(self, since: int = 0) -> State:
        now = self._clock()
        self._sweep(now)
        workers = tuple(self._record(worker, now) for worker in self._workers.values())
        requests = tuple(self._ledger.export(now, since))
        return State(self.generation, workers, requests, self.revision, dict(self._drains))

    @property
    def revision(self) -> int:
        """The revision that an export has now."""
        return self._ledger.revision

    async def merge(self, state: State) -> str:
        now = self._clock()
        self._sweep(now)
        self.generation = self.generation or state.generation or uuid.uuid4().hex
        for name, count in state.drains.items():
            if count > self._drains.get(name, 0):
                self._drains[name] = count
                self._roster_changed = True
        for record in state.workers:
            self._merge_worker(record, now)
        for known in state.requests:
            if known.booking:
                self._ledger.adopt(known, now + known.lease_s, now)
            else:
                self._ledger.conclude(known, now)
        return self.generation

    async def left(self) -> tuple[str, ...]:
        return tuple(worker_id for worker_id, gone in self._gone.items() if gone.over)

    async def booked_by(self, router_id: str) -> dict[str, Reserved]:
        return self._ledger.booked_by(router_id)

    async def close(self) -> None:
        return None

    def _merge_worker(self, record: WorkerRecord, now: float) -> None:
        """Take the later epoch, within one the longer lease. One with another model has to register."""
        lease_until = now + record.lease_left_s
        known = self._workers.get(record.worker_id)
        here = (known.epoch, known.lease_until) if known else (self._epoch_of(record.worker_id), now)
        newcomer = Deployment.of(record.identity)
        if (record.epoch, lease_until) <= here:
            return
        if self._workers and self._deployment:
            if self._deployment.refusal(self._topic, newcomer):
                return
        else:
            self._deployment = newcomer
        self._workers[record.worker_id] = _Worker(
            record.identity, record.state, record.load, lease_until, record.epoch
        )
        if known is None or known.identity != record.identity:
            self._joined(record.worker_id, lease_until)
        else:
            self._beaten.add(record.worker_id)
            self._none_ends_before = min(self._none_ends_before, lease_until)

    def _joined(self, worker_id: str, lease_until: float) -> None:
        self._gone.pop(worker_id, None)
        self._roster_changed = True
        self._none_ends_before = min(self._none_ends_before, lease_until)

    def _refresh(self, now: float) -> None:
        """Bring the records up to date."""
        changed = self._ledger.changed
        if self._roster_changed:
            self._records = {key: self._record(worker, now) for key, worker in self._workers.items()}
            self._by_roles = {}
        else:
            for key in (self._beaten | changed) & self._records.keys():
                worker, record = self._workers[key], self._records[key]
                record.state, record.load, record.epoch = worker.state, worker.load, worker.epoch
                record.reserved = self._ledger.reserved(key)
            for key, worker in self._workers.items():
                self._records[key].lease_left_s = worker.lease_until - now
        self._roster_changed = False
        changed.clear()
        self._beaten.clear()

    def _record(self, worker: _Worker, now: float) -> WorkerRecord:
        return WorkerRecord(
            identity=worker.identity,
            state=worker.state,
            load=worker.load,
            reserved=self._ledger.reserved(worker.identity.worker_id),
            drain_asked=self._drained(worker),
            lease_left_s=worker.lease_until - now,
            epoch=worker.epoch,
        )

    def _drained(self, worker: _Worker) -> bool:
        return self._drains.get(name_of(worker.identity), 0) % 2 == 1

    def _sweep(self, now: float) -> int:
        if now >= self._none_ends_before:
            for worker_id in [key for key, worker in self._workers.items() if worker.lease_until <= now]:
                self._gone[worker_id] = Past(self._workers.pop(worker_id).epoch, now + EPOCH_KEEP_S)
                self._roster_changed = True
            leases = (worker.lease_until for worker in self._workers.values())
            self._none_ends_before = min(leases, default=math.inf)
        forget(self._gone, now)
        return self._ledger.sweep(now)

    def _epoch_of(self, worker_id: str) -> int:
        worker = self._workers.get(worker_id)
        if worker:
            return worker.epoch
        gone = self._gone.get(worker_id)
        return gone.epoch if gone else 0

    def _count_stale(self, attempt: Attempt, result: ReportResult) -> None:
        result.stale += attempt.epoch < self._ledger.last(attempt.request_id)[0]


def _live_message(live: Live, now: float) -> pb.LiveAttempt:
    return pb.LiveAttempt(
        attempt=attempt_to_wire(live.booking.attempt),
        prefill_worker_id=live.booking.prefill_id,
        decode_worker_id=live.booking.decode_id,
        prefilled=live.prefilled,
        lease_left_s=max(0.0, live.lease_until - now),
    )


def _past(booking: Booking, event: pb.Finished) -> pb.PastHandoff:
    return pb.PastHandoff(
        attempt=event.attempt,
        prefill_worker_id=booking.prefill_id,
        decode_worker_id=booking.decode_id,
        outcome=event.outcome,
        cost=event.cost,
    )
