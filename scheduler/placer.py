"""Placing: a choice of workers that is booked at once.

Optimistic: the policy chooses on a view that may be `VIEW_AGE_S` old, then one atomic step of the store
checks limits, epoch and workers again and books. When another placement was faster, the choice is made again
on a fresh view. So a placement costs one round trip while many come in, two otherwise; and no request is
rejected on an old view. Where all workers are full, the routers' requests take turns by age (turns.py).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

from baton.protos import scheduler_pb2 as pb
from baton.scheduler.booking import Assignment, claim, waits_for_slot
from baton.scheduler.need import Need
from baton.scheduler.policy import NoChoice, Policy
from baton.scheduler.prefixes.ledger import PrefixLedger
from baton.scheduler.prefixes.match import Match
from baton.scheduler.store import Store
from baton.scheduler.turns import RouterTurns
from baton.scheduler.types import (
    Booking,
    FleetView,
    PlacementLimits,
    Reserved,
    ReserveOutcome,
    ReserveResult,
    WorkerRecord,
)

VIEW_AGE_S = 0.02  # s; nothing is chosen on a view older than this
MAX_TRIES = 4  # bookings tried for one placement


class Placer:
    """Places on behalf of one scheduler process. Several share a store, and decide at once."""

    def __init__(
        self,
        store: Store,
        policy: Policy,
        limits: PlacementLimits,
        lease_s: float,
        on_expired: Callable[[int], None],
        *,
        prefixes: PrefixLedger | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Place by `policy` and `limits`, with regard to what workers hold by `prefixes`.

        `on_expired` gets the number of attempts that ran out of lease. `clock` is in seconds, as that of
        `view`.
        """
        self._store = store
        self._policy = policy
        self._limits = limits
        self._lease_s = lease_s
        self._on_expired = on_expired
        self._prefixes = prefixes
        self._clock = clock
        self._view: FleetView | None = None
        self._read_at = 0.0  # on the clock, before `_view` was asked for
        self._reading = asyncio.Lock()
        self.turns = RouterTurns(clock)

    async def place(self, need: Need) -> Assignment | NoChoice:
        """Choose workers and book them, or say why not."""
        asked_at = self._clock()
        oldest = asked_at - VIEW_AGE_S
        if self._prefixes is not None and need.prefix.keys:
            need = replace(need, match=Match(self._prefixes, need.prefix, need.prompt_tokens))
        for _ in range(MAX_TRIES):
            view = await self.view(oldest)
            choice = self._policy.choose(view, need)
            if need.with_store and self._store.problem:
                choice = self._away()
            if isinstance(choice, NoChoice):
                if self._read_at >= asked_at:
                    if choice.code == pb.Rejection.CODE_FULL:
                        self.turns.refused(need)
                    return choice
                oldest = asked_at  # an old view is no ground for a rejection
                continue
            wanted = claim(need, choice.prefill, choice.decode, self._limits, choice.source)
            if elder := self.turns.elder(need, set(wanted.booking.worker_ids)):
                self.turns.refused(need)
                return NoChoice(pb.Rejection.CODE_FULL, f"a request of router {elder} goes first")
            waits = waits_for_slot(choice.decode)
            noted = _note(wanted.booking, view)
            try:
                result = await self._store.reserve(wanted, self._lease_s)
            except asyncio.CancelledError:  # if it was booked after all, the next view has it
                _take_back(noted)
                raise
            if result.expired:
                self._on_expired(result.expired)
            if result.outcome is ReserveOutcome.BOOKED:
                self.turns.placed(need)
                held = _held(need, wanted.booking.prompt_worker_id)
                return Assignment(choice.prefill, choice.decode, wanted.booking, held, waits, choice.source)
            _take_back(noted)
            if result.outcome in (ReserveOutcome.STALE, ReserveOutcome.AWAY):
                return self._refusal(need, result)
            oldest = self._clock()
        return NoChoice(
            pb.Rejection.CODE_FULL,
            f"others were faster {MAX_TRIES} times: too many requests at once",
        )

    async def view(self, oldest: float) -> FleetView:
        """Return a view no older than `oldest` (on the clock). Callers that wait share one call."""
        if self._view is not None and self._read_at >= oldest:
            return self._view
        async with self._reading:
            if self._view is None or self._read_at < oldest:
                read_at = self._clock()
                self._view = await self._store.view()
                self._read_at = read_at
                if self._view.expired:
                    self._on_expired(self._view.expired)
            return self._view

    def _refusal(self, need: Need, result: ReserveResult) -> NoChoice:
        """Return what another try would not change."""
        if result.outcome is ReserveOutcome.AWAY:
            return self._away()
        one = need.attempt
        message = f"epoch {one.epoch} of request {one.request_id} is not above {result.detail}, placed before"
        return NoChoice(pb.Rejection.CODE_STALE_EPOCH, message)

    def _away(self) -> NoChoice:
        return NoChoice(pb.Rejection.CODE_STORE_AWAY, f"it has lost its store: {self._store.problem}")


def _note(booked: Booking, view: FleetView) -> list[tuple[WorkerRecord, Reserved, Reserved]]:
    """Count a booking that is under way in the view, for those who choose meanwhile.

    A view that is read once it is booked has the exact count. Return what `_take_back` takes.
    """
    noted = []
    for worker_id in booked.worker_ids:
        worker, share = view.workers[worker_id], booked.share(worker_id)
        worker.reserved.add(share)
        noted.append((worker, worker.reserved, share))
    return noted


def _take_back(noted: list[tuple[WorkerRecord, Reserved, Reserved]]) -> None:
    """Undo `_note` where no exact count has come since."""
    for worker, reserved, share in noted:
        if worker.reserved is reserved:
            reserved.take(share)


def _held(need: Need, worker_id: str) -> int | None:
    known = need.match is not None and need.match.knows(worker_id)
    return need.prompt_tokens - need.tokens_for(worker_id) if known else None
