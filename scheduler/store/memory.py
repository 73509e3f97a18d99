"""The state in this process's memory. It is lost with the process; workers then register again."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from baton.protos import scheduler_pb2 as pb
from baton.scheduler.keys import EPOCH_KEEP_MS, HANDOFFS_KEPT
from baton.scheduler.store.base import Store
from baton.scheduler.types import (
    Attempt,
    Claim,
    Deployment,
    Heard,
    History,
    Report,
    ReportResult,
    Reserved,
    ReserveOutcome,
    ReserveResult,
    View,
    WorkerRecord,
    attempt_to_wire,
)

Clock = Callable[[], float]  # seconds, never going back


@dataclass(slots=True)
class _Worker:
    identity: pb.WorkerIdentity
    state: pb.WorkerState
    load: pb.WorkerLoad | None
    lease_until: float
    drain_asked: bool = False


@dataclass(slots=True)
class _Live:
    claim: Claim
    lease_until: float
    read: bool = False  # the prompt is


class MemoryStore(Store):
    """Every method runs without giving up the event loop: that is what makes it atomic."""

    def __init__(self, topic: str, clock: Clock = time.monotonic) -> None:
        self.name = "memory"
        self._topic = topic
        self._clock = clock
        self._workers: dict[str, _Worker] = {}
        self._deployment: Deployment | None = None
        self._reserved: dict[str, Reserved] = {}  # by worker id; no empty ones
        self._live: dict[str, _Live] = {}  # by request id
        self._epochs: dict[str, int] = {}  # by request id
        # Past requests whose epoch is still known -> when to forget it. The time kept is always the same, so
        # that insertion order is order of time.
        self._past: dict[str, float] = {}
        self._handoffs: deque[tuple[pb.PastHandoff, float]] = deque(maxlen=HANDOFFS_KEPT)

    async def view(self) -> View:
        now = self._clock()
        expired = self._sweep(now)
        workers = {key: self._record(worker, now) for key, worker in self._workers.items()}
        return View(workers=workers, live_attempts=len(self._live), expired=expired)

    async def reserve(self, claim: Claim, lease_s: float) -> ReserveResult:
        now = self._clock()
        expired = self._sweep(now)
        request_id = claim.attempt.request_id
        last = self._epochs.get(request_id, 0)
        if claim.attempt.epoch <= last:
            return ReserveResult(ReserveOutcome.STALE, str(last), expired)
        if request_id in self._live:
            self._release(request_id, now)
        for worker_id in claim.worker_ids:
            worker = self._workers.get(worker_id)
            if worker is None or not self._record(worker, now).placeable:
                return ReserveResult(ReserveOutcome.GONE, worker_id, expired)
        queued = self._reserved.get(claim.reader_id, Reserved()).prompt_tokens
        if queued and queued + claim.prompt_tokens > claim.max_prompt_tokens:
            return ReserveResult(ReserveOutcome.FULL, claim.reader_id, expired)
        writer = self._reserved.get(claim.decode_id, Reserved())
        if writer.requests >= claim.max_requests or writer.blocks + claim.blocks > claim.max_blocks:
            return ReserveResult(ReserveOutcome.FULL, claim.decode_id, expired)
        for worker_id in claim.worker_ids:
            claim.book(worker_id, self._reserved.setdefault(worker_id, Reserved()))
        self._live[request_id] = _Live(claim, now + lease_s)
        self._epochs[request_id] = claim.attempt.epoch
        self._past.pop(request_id, None)
        return ReserveResult(ReserveOutcome.BOOKED, expired=expired)

    async def report(self, report: Report, lease_s: float) -> ReportResult:
        now = self._clock()
        result = ReportResult()
        for attempt in report.prefilled:
            live = self._find(attempt, result)
            if live and not live.read:
                self._release_reading(live)
        for attempt, event in report.finished:
            live = self._find(attempt, result)
            if live:
                self._release(attempt.request_id, now)
                self._handoffs.appendleft((_past(live.claim, event), now))
        for attempt in report.renewed:
            live = self._find(attempt, result)
            if live:
                live.lease_until = now + lease_s
            else:
                result.lost.append(attempt)
        return result

    async def register(self, identity: pb.WorkerIdentity, state: pb.WorkerState, lease_s: float) -> str:
        now = self._clock()
        self._sweep(now)
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
            drain_asked=bool(known and known.drain_asked),
        )
        return ""

    async def heartbeat(
        self, worker_id: str, state: pb.WorkerState, load: pb.WorkerLoad, lease_s: float
    ) -> Heard:
        now = self._clock()
        worker = self._workers.get(worker_id)
        if worker is None or worker.lease_until <= now:
            return Heard(known=False, drain=False)
        worker.state, worker.load, worker.lease_until = state, load, now + lease_s
        return Heard(known=True, drain=worker.drain_asked)

    async def deregister(self, worker_id: str) -> None:
        self._workers.pop(worker_id, None)

    async def drain(self, worker_id: str) -> bool:
        worker = self._workers.get(worker_id)
        if worker is None or worker.lease_until <= self._clock():
            return False
        worker.drain_asked = True
        return True

    async def history(self, limit: int) -> History:
        now = self._clock()
        newest = sorted(self._live.values(), key=lambda live: live.lease_until, reverse=True)[:limit]
        handoffs: list[pb.PastHandoff] = []
        for past, ended in list(self._handoffs)[:limit]:
            aged = pb.PastHandoff()
            aged.CopyFrom(past)
            aged.age_s = now - ended
            handoffs.append(aged)
        return History([_live_message(live, now) for live in newest], handoffs)

    async def close(self) -> None:
        return None

    def _record(self, worker: _Worker, now: float) -> WorkerRecord:
        return WorkerRecord(
            identity=worker.identity,
            state=worker.state,
            load=worker.load,
            reserved=replace(self._reserved.get(worker.identity.worker_id, Reserved())),
            drain_asked=worker.drain_asked,
            lease_left_s=worker.lease_until - now,
        )

    def _sweep(self, now: float) -> int:
        for worker_id in [key for key, worker in self._workers.items() if worker.lease_until <= now]:
            del self._workers[worker_id]
        gone = [key for key, live in self._live.items() if live.lease_until <= now]
        for request_id in gone:
            self._release(request_id, now)
        while self._past:
            request_id, forget_at = next(iter(self._past.items()))
            if forget_at > now:
                break
            del self._past[request_id]
            del self._epochs[request_id]
        return len(gone)

    def _find(self, attempt: Attempt, result: ReportResult) -> _Live | None:
        """The live attempt that is meant; counts events of older epochs."""
        if attempt.epoch < self._epochs.get(attempt.request_id, 0):
            result.stale += 1
            return None
        live = self._live.get(attempt.request_id)
        return live if live and live.claim.attempt == attempt else None

    def _release(self, request_id: str, now: float) -> None:
        live = self._live.pop(request_id)
        if not live.read:
            self._release_reading(live)
        self._give_back(live.claim.decode_id, requests=1, blocks=live.claim.blocks)
        self._past[request_id] = now + EPOCH_KEEP_MS / 1_000

    def _release_reading(self, live: _Live) -> None:
        live.read = True
        alone = not live.claim.prefill_id
        self._give_back(
            live.claim.reader_id, prompt_tokens=live.claim.prompt_tokens, requests=0 if alone else 1
        )

    def _give_back(self, worker_id: str, prompt_tokens: int = 0, requests: int = 0, blocks: int = 0) -> None:
        reserved = self._reserved[worker_id]
        reserved.prompt_tokens -= prompt_tokens
        reserved.requests -= requests
        reserved.blocks -= blocks
        if reserved.empty:
            del self._reserved[worker_id]


def _live_message(live: _Live, now: float) -> pb.LiveAttempt:
    return pb.LiveAttempt(
        attempt=attempt_to_wire(live.claim.attempt),
        prefill_worker_id=live.claim.prefill_id,
        decode_worker_id=live.claim.decode_id,
        prefilled=live.read,
        lease_left_s=max(0.0, live.lease_until - now),
    )


def _past(claim: Claim, event: pb.Finished) -> pb.PastHandoff:
    return pb.PastHandoff(
        attempt=event.attempt,
        prefill_worker_id=claim.prefill_id,
        decode_worker_id=claim.decode_id,
        outcome=event.outcome,
        cost=event.cost,
    )
