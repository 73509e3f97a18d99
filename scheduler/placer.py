"""Choose workers and book them, in one step of the event loop.

Two schedulers may give away the same room; the worker then refuses one of the requests. An encode never
waits.

When all workers are full, requests are placed by class priority, then by age: otherwise a router with many
running requests would get every place that becomes free. The scheduler knows only each router's last refused
request. Several schedulers share these requests through the store twice a second, which is often enough,
because ages are compared with a tolerance of a second.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from baton.prefix_keys import NO_KEYS
from baton.protos import scheduler_pb2 as pb
from baton.scheduler.booking import Assignment, booking_of, waits_for_slot
from baton.scheduler.ledger import Ledger
from baton.scheduler.need import Need, need_from_wire, need_to_wire
from baton.scheduler.policy import NoChoice, Policy
from baton.scheduler.prefixes.prefix_ledger import Match, PrefixLedger
from baton.scheduler.roster import Roster
from baton.scheduler.store import Store

TOLERANCE_S = 1.0  # s; otherwise slots would stay empty until the older request asks again
HEARD_S = 1.5  # s; routers ask at least once a second (RETRY_S in services/router/waiting.py)


@dataclass(frozen=True, slots=True)
class _Waiting:
    need: Need
    since: float  # on the clock
    heard: float  # on the clock

    def goes_before(self, need: Need, since: float) -> bool:
        """Return whether this request comes before `need`. A new one does not: it may never ask again."""
        mine = self.need
        before = self.since < since if mine.priority == need.priority else mine.priority < need.priority
        return before and mine.waited_s > TOLERANCE_S

    def could_take(self, need: Need, worker_ids: set[str]) -> bool:
        """Return whether these workers, chosen for `need`, could take this request instead."""
        mine = self.need
        return (
            worker_ids.isdisjoint(mine.exclude)
            and mine.vllm_version in ("", need.vllm_version)
            and mine.model_fingerprint in ("", need.model_fingerprint)
            and mine.adapter in (None, need.adapter)
        )


class RouterTurns:
    """Each router's last request that was refused because all workers are full."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._waiting: dict[str, _Waiting] = {}
        self._elsewhere: list[_Waiting] = []  # requests at other schedulers

    def refused(self, need: Need) -> None:
        now = self._clock()
        self._waiting[need.router_id] = _Waiting(need, now - need.waited_s, now)

    def placed(self, need: Need) -> None:
        waiting = self._waiting.get(need.router_id)
        if waiting is not None and waiting.need.attempt.request_id == need.attempt.request_id:
            del self._waiting[need.router_id]

    @property
    def any(self) -> bool:
        return bool(self._waiting or self._elsewhere)

    def elder(self, need: Need, worker_ids: set[str]) -> str:
        """Return the router whose request goes before `need` and could take its workers; "" if none."""
        if not self.any:
            return ""
        now = self._clock()
        self._forget(now)
        since = now - need.waited_s - TOLERANCE_S
        for other in (*self._waiting.values(), *self._elsewhere):
            if other.need.router_id == need.router_id or not other.goes_before(need, since):
                continue
            if other.could_take(need, worker_ids):
                return other.need.router_id
        return ""

    def told(self) -> pb.Turns:
        now = self._clock()
        self._forget(now)
        return pb.Turns(heads=[_head(one, now) for one in self._waiting.values()])

    def hear(self, others: Sequence[pb.Turns]) -> None:
        now = self._clock()
        heads = [need_from_wire(head) for one in others for head in one.heads]
        self._elsewhere = [_Waiting(need, now - need.waited_s, now) for need in heads]

    def _forget(self, now: float) -> None:
        oldest = now - HEARD_S
        for router_id in [key for key, one in self._waiting.items() if one.heard < oldest]:
            del self._waiting[router_id]
        if self._elsewhere and self._elsewhere[0].heard < oldest:
            self._elsewhere = []


def _head(waiting: _Waiting, now: float) -> pb.Need:
    """Return a request for other schedulers, with its present age and without its keys."""
    return need_to_wire(replace(waiting.need, waited_s=now - waiting.since, prefix=NO_KEYS))


class SharedTurns:
    """Share waiting requests with other schedulers through the store."""

    def __init__(self, store: Store, turns: RouterTurns) -> None:
        self._store = store
        self._turns = turns
        self._id = uuid.uuid4().hex
        self._told = False  # the store may have an entry of ours

    async def tend(self) -> None:
        """Write and read waiting requests. Call it about twice a second."""
        mine = self._turns.told()
        if mine.heads or self._told:
            await self._store.tell("turns", self._id, mine.SerializeToString(), HEARD_S)
            self._told = bool(mine.heads)
        theirs = (await self._store.told()).turns
        self._turns.hear([pb.Turns.FromString(raw) for who, raw in theirs.items() if who != self._id])


class Placer:
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
