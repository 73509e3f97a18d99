"""Attempts and their bookings, in this scheduler's memory.

Routers report every booking and its end to all schedulers, so all schedulers reach the same sums. Nothing is
stored: routers report all their bookings again to a scheduler that was restarted.
"""

from __future__ import annotations

import time
import uuid
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from heapq import heappop, heappush, nlargest

from baton.attempts import EPOCH_KEEP_S, Attempt, is_image
from baton.protos import scheduler_pb2 as pb
from baton.scheduler.types import Booking, ReportResult, Reserved, RouterReport, attempt_to_wire

HANDOFFS_KEPT = 64  # finished attempts kept for operators

Sums = dict[str, Reserved]  # worker id -> bookings


@dataclass(slots=True)
class Live:
    """A live attempt. Times are seconds on the ledger's clock."""

    booking: Booking  # as it was placed, or with fewer blocks
    lease_until: float
    prefilled: bool = False
    look_at: float = 0.0  # when to check the lease next


@dataclass(slots=True)
class Past:
    """The epoch of a request or worker that has ended, remembered for `EPOCH_KEEP_S`."""

    epoch: int
    forget_at: float
    over: bool = False  # the router reported the end, or the worker deregistered


class Ledger:
    """All bookings. Every method is one atomic step of the event loop.

    Invariants: a worker's sum equals what the live attempts book on it, and is never negative; a router's sum
    is that of its own attempts; a request is live or past, never both; its epoch never falls while it is
    known.
    """

    def __init__(self, lease_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Start without bookings. A booking is released when it is not renewed for `lease_s` seconds."""
        self.generation = uuid.uuid4().hex  # when it changes, routers report everything again
        self.expired = 0  # number of attempts that were not renewed in time
        self.live: dict[str, Live] = {}  # keyed by request id
        self._lease_s = lease_s
        self._clock = clock
        # Heap of (`Live.look_at`, request id), with outdated entries.
        self._looks: list[tuple[float, str]] = []
        self._past: OrderedDict[str, Past] = OrderedDict()  # keyed by request id; see `forget`
        self._reserved: Sums = {}  # for workers with bookings, and all in `_members`
        self._members: set[str] = set()
        self._routers: dict[str, Sums] = {}  # keyed by router id; no empty entries
        self._handoffs: deque[tuple[pb.PastHandoff, float]] = deque(maxlen=HANDOFFS_KEPT)

    def join(self, worker_id: str) -> Reserved:
        """Return the sum of the bookings on a worker; the object is updated until `leave`."""
        self._members.add(worker_id)
        return self._reserved.setdefault(worker_id, Reserved())

    def leave(self, worker_id: str) -> None:
        """Drop a worker's sum as soon as it has no bookings."""
        self._members.discard(worker_id)
        if worker_id in self._reserved and self._reserved[worker_id].empty:
            del self._reserved[worker_id]

    def booked_by(self, router_id: str) -> Sums:
        return {worker_id: replace(one) for worker_id, one in self._routers.get(router_id, {}).items()}

    def last(self, request_id: str) -> tuple[int, bool]:
        """Return the last epoch of a request (0: unknown) and whether that attempt has ended."""
        live = self.live.get(request_id)
        if live:
            return live.booking.attempt.epoch, False
        past = self._past.get(request_id)
        return (past.epoch, past.over) if past else (0, False)

    def place(self, booking: Booking) -> None:
        """Book a new attempt, replacing an older one at the same request. Its epoch must be new."""
        self._replace(booking.attempt)
        self._book(booking)

    def report(self, report: RouterReport) -> ReportResult:
        """Apply a router's report. Events of superseded or unknown attempts change nothing.

        "Placed" books an attempt that already runs, regardless of limits. "Prefilled" releases the prompt's
        tokens and the prefill worker, "finished" releases everything, "renewed" extends the lease. Called up
        to 100 times a second for each router.
        """
        self.sweep()
        result = ReportResult()
        for booking in report.placed:
            self._count_stale(booking.attempt, result)
            if not self._adopt(booking):
                result.fenced.append(booking.attempt)
        for attempt in report.prefilled:
            if live := self._find(attempt, result):
                self._end_prefill(live)
        for attempt, event in report.finished:
            if live := self._find(attempt, result):
                self._release(attempt.request_id, over=True)
                self._keep(live.booking, event)
                result.ended.append((live.booking, event))
            elif not self._fenced(attempt):  # its booking may still arrive, and must be refused
                self._replace(attempt)
                self._note(attempt.request_id, attempt.epoch, over=True)
        for attempt in report.renewed:
            if live := self._find(attempt, result):
                live.lease_until = self._clock() + self._lease_s
            else:
                (result.fenced if self._fenced(attempt) else result.lost).append(attempt)
        for attempt, blocks in report.shared:
            if live := self._find(attempt, result):
                self._share(live, blocks)
        return result

    def sweep(self) -> None:
        now = self._clock()
        while self._looks and self._looks[0][0] <= now:
            look_at, request_id = heappop(self._looks)
            live = self.live.get(request_id)
            if live is None or live.look_at != look_at:
                continue
            if live.lease_until > now:  # it was renewed
                self._look(live)
                continue
            self._release(request_id, over=False)
            self.expired += 1
        forget(self._past, now)

    def history(self, limit: int) -> tuple[list[pb.LiveAttempt], list[pb.PastHandoff]]:
        """Return the newest live and finished attempts, at most `limit` of each."""
        now = self._clock()
        newest = nlargest(limit, self.live.values(), key=lambda live: live.lease_until)
        handoffs: list[pb.PastHandoff] = []
        for past, ended in list(self._handoffs)[:limit]:
            aged = pb.PastHandoff()
            aged.CopyFrom(past)
            aged.age_s = now - ended
            handoffs.append(aged)
        return [_live_message(live, now) for live in newest], handoffs

    def _find(self, attempt: Attempt, result: ReportResult) -> Live | None:
        self._count_stale(attempt, result)
        live = self.live.get(attempt.request_id)
        return live if live and live.booking.attempt == attempt else None

    def _count_stale(self, attempt: Attempt, result: ReportResult) -> None:
        result.stale += attempt.epoch < self.last(attempt.request_id)[0]

    def _fenced(self, attempt: Attempt) -> bool:
        """Return whether a later epoch was placed or this one has ended, so it must not be booked."""
        last, over = self.last(attempt.request_id)
        return attempt.epoch < last or (attempt.epoch == last and over)

    def _adopt(self, booking: Booking) -> bool:
        if self._fenced(booking.attempt):
            return False
        live = self.live.get(booking.attempt.request_id)
        if live is None or live.booking.attempt != booking.attempt:
            self._replace(booking.attempt)
            live = self._book(replace(booking, prefilled=False))
        live.lease_until = self._clock() + self._lease_s
        if booking.prefilled:
            self._end_prefill(live)
        self._share(live, booking.blocks)
        return True

    def _replace(self, attempt: Attempt) -> None:
        if attempt.request_id in self.live:
            self._release(attempt.request_id, over=True)

    def _book(self, booking: Booking) -> Live:
        for worker_id in booking.worker_ids:
            self._add(booking, worker_id, booking.share(worker_id))
        live = Live(booking, self._clock() + self._lease_s)
        self.live[booking.attempt.request_id] = live
        self._look(live)
        self._past.pop(booking.attempt.request_id, None)
        return live

    def _end_prefill(self, live: Live) -> None:
        if live.prefilled:
            return
        live.prefilled = True
        booking = live.booking
        requests = 1 if booking.prefill_id else 0
        self._add(booking, booking.decode_id, Reserved(decoding=1))
        self._give_back(booking, booking.prompt_worker_id, Reserved(booking.prompt_tokens, requests))

    def _share(self, live: Live, blocks: int) -> None:
        """Book only `blocks` KV blocks: the rest are shared with other requests, which hold them anyway."""
        more = live.booking.blocks - blocks
        if more > 0:
            self._give_back(live.booking, live.booking.decode_id, Reserved(blocks=more))
            live.booking = replace(live.booking, blocks=blocks)

    def _release(self, request_id: str, *, over: bool) -> None:
        live = self.live.pop(request_id)
        self._end_prefill(live)
        booking = live.booking
        share = Reserved(requests=1, blocks=booking.blocks, decoding=1)
        self._give_back(booking, booking.decode_id, share)
        self._note(request_id, booking.attempt.epoch, over=over)

    def _keep(self, booking: Booking, event: pb.Finished) -> None:
        if not is_image(booking.attempt.request_id):
            self._handoffs.appendleft((_past(booking, event), self._clock()))

    def _note(self, request_id: str, epoch: int, *, over: bool) -> None:
        self._past.pop(request_id, None)  # the newest goes to the end
        self._past[request_id] = Past(epoch, self._clock() + EPOCH_KEEP_S, over)

    def _look(self, live: Live) -> None:
        live.look_at = live.lease_until
        heappush(self._looks, (live.look_at, live.booking.attempt.request_id))

    def _add(self, booking: Booking, worker_id: str, share: Reserved) -> None:
        for sums in (self._reserved, self._routers.setdefault(booking.router_id, {})):
            sums.setdefault(worker_id, Reserved()).add(share)

    def _give_back(self, booking: Booking, worker_id: str, share: Reserved) -> None:
        self._reserved[worker_id].take(share)
        if self._reserved[worker_id].empty and worker_id not in self._members:
            del self._reserved[worker_id]
        theirs = self._routers[booking.router_id]
        theirs[worker_id].take(share)
        if theirs[worker_id].empty:
            del theirs[worker_id]
        if not theirs:
            del self._routers[booking.router_id]


def forget(past: OrderedDict[str, Past], now: float) -> None:
    """Drop expired entries. All entries are kept equally long, so insertion order is expiry order.

    `past` is an OrderedDict because finding the first key of a plain dict walks over all deleted keys before
    it, which takes 6 us per call with 50,000 requests coming and going.
    """
    while past:
        oldest = next(iter(past))
        if past[oldest].forget_at > now:
            return
        del past[oldest]


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
