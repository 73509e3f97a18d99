"""A simulated worker's own count of what it has promised: it takes a request, or refuses it at once.

The bounds are those of a booking (scheduler/booking.py), asked of the worker's exact count. The worker
remembers for a moment whom it had no room for, as the scheduler does (scheduler/turns.py): a younger request
does not take the place for which an elder one asks again.

Changes are kept for a few seconds, so that a router can be told what was true a while ago.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container
from dataclasses import dataclass, replace
from enum import Enum

from baton.scheduler.booking import could_decode, could_prefill, may_decode, may_prefill
from baton.scheduler.need import Need
from baton.scheduler.policy.base import Side
from baton.scheduler.turns import RouterTurns
from baton.scheduler.types import PlacementLimits, Reserved, WorkerRecord

SURPRISE_TOKENS = 512  # of prompts, more than expected before one: 64 ms of the assumed pace
NOTHING = Reserved()


@dataclass(frozen=True, slots=True)
class _Change:
    at: float
    router_id: str
    before: Reserved  # the request's share
    after: Reserved


class Answer(Enum):
    """The outcome of a request's question for room."""

    ROOM = "room"
    FULL = "full"
    ELDER = "elder"  # there is room, for a request that has waited longer


class Admission:
    """The promises of one worker. Every method is one step."""

    def __init__(
        self,
        record: WorkerRecord,
        limits: PlacementLimits,
        clock: Callable[[], float],
        kept_s: float,
        save_room: Callable[[int], bool],
    ) -> None:
        """Count in `record`, and keep changes for `kept_s` seconds.

        `save_room` tells whether the KV of so many more tokens can be saved.
        """
        self.record = record
        self.turns = RouterTurns(clock)
        self._limits = limits
        self._clock = clock
        self._kept_s = kept_s
        self._save_room = save_room
        self._shares: dict[str, tuple[str, Reserved]] = {}  # by request: its router, and what it holds
        self._decoding: dict[str, int] = {}  # by router
        self._changes: deque[_Change] = deque()

    def take(
        self,
        need: Need,
        side: Side,
        share: Reserved,
        expected: Reserved | None = None,
        *,
        in_turn: bool = True,
    ) -> bool:
        """Promise `share` of this worker to `need`, or refuse it.

        expected: what the router believes to be promised: where it is much more, another may do better
        in_turn: refuse it, too, where an elder one has asked
        """
        answer = self.answer(need, side)
        if answer is Answer.FULL or (in_turn and answer is Answer.ELDER):
            return False
        if expected is not None and self._is_worse(expected, side):
            return False
        self.turns.placed(need)
        self._set(need.attempt.request_id, need.router_id, share)
        return True

    def answer(self, need: Need, side: Side) -> Answer:
        """Return whether there is room for `need` now; else remember that it asked."""
        if not self._has_room(need, side):
            answer = Answer.FULL
        elif self.turns.elder(need, {self.record.worker_id}):
            answer = Answer.ELDER
        else:
            return Answer.ROOM
        self.turns.refused(need)
        return answer

    def prefilled(self, request_id: str, *, decodes: bool) -> None:
        """Note that a request's prompt is prefilled, and whether it goes on here."""
        if request_id in self._shares:
            router_id, share = self._shares[request_id]
            after = replace(share, prompt_tokens=0, decoding=1) if decodes else NOTHING
            self._set(request_id, router_id, after)

    def end(self, request_id: str) -> None:
        """Forget a request."""
        if request_id in self._shares:
            self._set(request_id, self._shares[request_id][0], NOTHING)

    def decodes_for(self, router_id: str) -> bool:
        """Return whether requests of this router decode here: each step brings it a reply."""
        return router_id in self._decoding

    def as_of(
        self,
        at: float,
        router_id: str,
        own_at: float,
        noted_at: float = 0.0,
        peers: Container[str] = (),
    ) -> Reserved:
        """Return what was promised at a moment, and what changed since then as far as a router knows it.

        own_at: what its own requests gave back up to then counts; what they took always does
        noted_at: what others took up to then counts, but not what they gave back
        peers: what these took counts as its own
        """
        found = replace(self.record.reserved)
        for change in reversed(self._changes):
            if change.at <= at:
                break
            taken, own = change.before.empty, change.router_id == router_id
            if taken and (own or change.router_id in peers or change.at <= noted_at):
                continue
            if own and change.at <= own_at:
                continue
            found.prompt_tokens += change.before.prompt_tokens - change.after.prompt_tokens
            found.requests += change.before.requests - change.after.requests
            found.blocks += change.before.blocks - change.after.blocks
            found.decoding += change.before.decoding - change.after.decoding
        return found

    def _is_worse(self, expected: Reserved, side: Side) -> bool:
        """Return whether a request would wait longer than its router expects."""
        now = self.record.reserved
        queues = Side.PREFILL in side and now.prompt_tokens > expected.prompt_tokens + SURPRISE_TOKENS
        return queues or (side is Side.BOTH and now.decoding > 0 == expected.decoding)

    def _has_room(self, need: Need, side: Side) -> bool:
        record, limits = self.record, self._limits
        if Side.PREFILL in side and not (could_prefill(need, record) and may_prefill(need, record, limits)):
            return False
        if Side.DECODE in side and not (could_decode(need, record) and may_decode(need, record, limits)):
            return False
        return side is not Side.PREFILL or self._save_room(need.prompt_tokens)

    def _set(self, request_id: str, router_id: str, after: Reserved) -> None:
        now = self._clock()
        before = self._shares.pop(request_id, (router_id, NOTHING))[1]
        if not after.empty:
            self._shares[request_id] = router_id, after
        self.record.reserved.take(before)
        self.record.reserved.add(after)
        decoding = self._decoding.pop(router_id, 0) + after.decoding - before.decoding
        if decoding:
            self._decoding[router_id] = decoding
        self._changes.append(_Change(now, router_id, before, after))
        while self._changes[0].at < now - self._kept_s:
            self._changes.popleft()
