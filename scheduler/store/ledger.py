"""Attempts and their bookings, in this process's memory: the part of the memory store that counts.

Invariants: what is booked on a worker is the sum of what live attempts hold of it, and never below zero; what
is booked for a router, that of its own; a request is live or past, never both; its epoch never falls while it
is known.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from heapq import heappop, heappush

from baton.attempts import EPOCH_KEEP_S, Attempt
from baton.scheduler.types import Booking, Known, Reserved

Sums = dict[str, Reserved]  # what is booked, by worker id; no empty ones


@dataclass(slots=True)
class Live:
    """An attempt under way. Times are those of the caller's clock, seconds."""

    booking: Booking
    lease_until: float
    prefilled: bool = False
    look_at: float = 0.0  # the next look at the lease, at the latest when it ends


@dataclass(slots=True)
class Past:
    """A request or a worker that is gone: its epoch is remembered for a while."""

    epoch: int
    forget_at: float
    over: bool = False  # as in `Known`; of a worker: it deregistered
    revision: int = 0  # of the ledger, when it was noted; of a worker: 0


class Ledger:
    """The bookings. Every method is one step; none gives up the event loop."""

    def __init__(self) -> None:
        self.live: dict[str, Live] = {}  # by request id
        self.revision = 0  # how often a request became past, or was learned to be
        self._looks: list[
            tuple[float, str]
        ] = []  # heap of `Live.look_at`; those that changed since stay in it
        self._past: OrderedDict[str, Past] = OrderedDict()  # by request id; see `forget`
        self._reserved: Sums = {}
        self.changed: set[str] = (
            set()
        )  # workers on which something was booked or released; the store clears it
        self._routers: dict[str, Sums] = {}  # by router id; no empty ones

    def reserved(self, worker_id: str) -> Reserved:
        """Return a copy of what is booked on a worker."""
        return replace(self._reserved.get(worker_id, Reserved()))

    def booked_by(self, router_id: str) -> Sums:
        """Return a copy of what is booked for a router. Every router asks once a second."""
        return {worker_id: replace(one) for worker_id, one in self._routers.get(router_id, {}).items()}

    def last(self, request_id: str) -> tuple[int, bool]:
        """Return the last epoch of a request, 0 if it is unknown, and whether that attempt is over."""
        live = self.live.get(request_id)
        if live:
            return live.booking.attempt.epoch, False
        past = self._past.get(request_id)
        return (past.epoch, past.over) if past else (0, False)

    def find(self, attempt: Attempt) -> Live | None:
        """Return the attempt, if it is the live one."""
        live = self.live.get(attempt.request_id)
        return live if live and live.booking.attempt == attempt else None

    def fenced(self, attempt: Attempt) -> bool:
        """Return whether a later epoch was placed, or this one is over: nothing brings it back."""
        last, over = self.last(attempt.request_id)
        return attempt.epoch < last or (attempt.epoch == last and over)

    def book(self, booking: Booking, lease_until: float) -> Live:
        """Count `booking`, whatever the limits. Its request must not be live."""
        for worker_id in booking.worker_ids:
            self._add(booking, worker_id, booking.share(worker_id))
        live = self.live[booking.attempt.request_id] = Live(booking, lease_until)
        self._look(live)
        self._past.pop(booking.attempt.request_id, None)
        return live

    def renew(self, live: Live, lease_until: float) -> None:
        """Let its lease end then."""
        live.lease_until = lease_until
        if lease_until < live.look_at:
            self._look(live)

    def adopt(self, known: Known, lease_until: float, now: float) -> bool:
        """Book what runs already, if it is not; return False when it is fenced, or holds nothing."""
        booking = known.booking
        if booking is None or self.fenced(known.attempt):
            return False
        live = self.find(known.attempt)
        if live is None:
            if known.attempt.request_id in self.live:
                self.release(known.attempt.request_id, now, over=True)
            live = self.book(booking, lease_until)
        self.renew(live, max(live.lease_until, lease_until))
        if known.prefilled:
            self.end_prefill(live)
        self.share(live, booking.blocks)
        return True

    def conclude(self, known: Known, now: float) -> None:
        """Note that an attempt is over, or at least that its epoch was placed."""
        request_id = known.attempt.request_id
        if (known.attempt.epoch, known.over) <= self.last(request_id):
            return
        if request_id in self.live:
            self.release(request_id, now, over=True)
        self._note(request_id, known.attempt.epoch, now, over=known.over)

    def end_prefill(self, live: Live) -> None:
        """Free what was held for the prompt, once."""
        if live.prefilled:
            return
        live.prefilled = True
        booking = live.booking
        requests = 1 if booking.prefill_id else 0
        self._add(booking, booking.decode_id, Reserved(decoding=1))
        self._give_back(booking, booking.prompt_worker_id, Reserved(booking.prompt_tokens, requests))

    def share(self, live: Live, blocks: int) -> None:
        """Book no more than so many KV blocks: other requests hold the others as well."""
        more = live.booking.blocks - blocks
        if more > 0:
            self._give_back(live.booking, live.booking.decode_id, Reserved(blocks=more))
            live.booking = replace(live.booking, blocks=blocks)

    def release(self, request_id: str, now: float, *, over: bool) -> None:
        """Free all that a live request holds."""
        live = self.live.pop(request_id)
        self.end_prefill(live)
        booking = live.booking
        share = Reserved(requests=1, blocks=booking.blocks, decoding=1)
        self._give_back(booking, booking.decode_id, share)
        self._note(request_id, booking.attempt.epoch, now, over=over)

    def sweep(self, now: float) -> int:
        """Release what ran out of lease; return the number of attempts."""
        expired = 0
        while self._looks and self._looks[0][0] <= now:
            look_at, request_id = heappop(self._looks)
            live = self.live.get(request_id)
            if live is None or live.look_at != look_at:
                continue
            if live.lease_until > now:  # renewed meanwhile
                self._look(live)
                continue
            self.release(request_id, now, over=False)
            expired += 1
        forget(self._past, now)
        return expired

    def running(self, now: float) -> Iterator[Known]:
        """Yield the live attempts."""
        for live in self.live.values():
            yield Known(live.booking.attempt, live.booking, live.prefilled, lease_s=live.lease_until - now)

    def export(self, now: float, since: int = 0) -> Iterator[Known]:
        """Yield what is live, and what became past since that revision: the newest first."""
        yield from self.running(now)
        for request_id, past in reversed(self._past.items()):
            if past.revision <= since:
                return
            yield Known(Attempt(request_id, past.epoch), over=past.over)

    def _note(self, request_id: str, epoch: int, now: float, *, over: bool) -> None:
        self.revision += 1
        self._past.pop(request_id, None)  # what is noted again is the newest
        self._past[request_id] = Past(epoch, now + EPOCH_KEEP_S, over, self.revision)

    def _look(self, live: Live) -> None:
        live.look_at = live.lease_until
        heappush(self._looks, (live.look_at, live.booking.attempt.request_id))

    def _add(self, booking: Booking, worker_id: str, share: Reserved) -> None:
        self.changed.add(worker_id)
        for sums in (self._reserved, self._routers.setdefault(booking.router_id, {})):
            sums.setdefault(worker_id, Reserved()).add(share)

    def _give_back(self, booking: Booking, worker_id: str, share: Reserved) -> None:
        self.changed.add(worker_id)
        theirs = self._routers[booking.router_id]
        for sums in (self._reserved, theirs):
            sums[worker_id].take(share)
            if sums[worker_id].empty:
                del sums[worker_id]
        if not theirs:
            del self._routers[booking.router_id]


def forget(past: OrderedDict[str, Past], now: float) -> None:
    """Drop entries whose time has come. All are kept equally long: insertion order is order of time.

    To find a plain dict's first key Python passes over all that were deleted before it: 6 us of each call
    where 50,000 requests come and go.
    """
    while past:
        oldest = next(iter(past))
        if past[oldest].forget_at > now:
            return
        del past[oldest]
