"""Choose workers and book them, in one step of the event loop.

Two schedulers may give the same room away; the worker then refuses one of the requests. When all workers are
full, the oldest request goes first (turns.py). An encode never waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from baton.protos import scheduler_pb2 as pb
from baton.scheduler.booking import Assignment, booking_of, waits_for_slot
from baton.scheduler.ledger import Ledger
from baton.scheduler.need import Need
from baton.scheduler.policy import NoChoice, Policy
from baton.scheduler.prefixes.prefix_ledger import Match, PrefixLedger
from baton.scheduler.roster import Roster
from baton.scheduler.turns import RouterTurns


class Placer:
    """Place requests for one scheduler process."""

    def __init__(
        self,
        roster: Roster,
        ledger: Ledger,
        policy: Policy,
        *,
        prefixes: PrefixLedger | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._roster = roster
        self._ledger = ledger
        self._policy = policy
        self._prefixes = prefixes
        self.turns = RouterTurns(clock)

    def place(self, need: Need) -> Assignment | NoChoice:
        self._ledger.sweep()
        one = need.attempt
        last, _ = self._ledger.last(one.request_id)
        if one.epoch <= last:
            message = f"epoch {one.epoch} of request {one.request_id} is not above {last}, placed before"
            return NoChoice(pb.Rejection.CODE_STALE_EPOCH, message)
        if self._prefixes is not None and need.prefix.keys:
            need = replace(need, match=Match(self._prefixes, need.prefix, need.prompt_tokens))
        choice = self._policy.choose(self._roster.view(), need)
        if isinstance(choice, NoChoice):
            if choice.code == pb.Rejection.CODE_FULL and not need.encode:
                self.turns.refused(need)
            return choice
        booking = booking_of(need, choice.prefill, choice.decode, choice.source)
        if not need.encode and (elder := self.turns.elder(need, set(booking.worker_ids))):
            self.turns.refused(need)
            return NoChoice(pb.Rejection.CODE_FULL, f"a request of router {elder} goes first")
        waits = waits_for_slot(choice.decode)
        self._ledger.place(booking)
        self.turns.placed(need)
        held = _held(need, booking.prompt_worker_id)
        return Assignment(choice.prefill, choice.decode, booking, held, waits, choice.source)


def _held(need: Need, worker_id: str) -> int | None:
    known = need.match is not None and need.match.knows(worker_id)
    return need.prompt_tokens - need.tokens_for(worker_id) if known else None
