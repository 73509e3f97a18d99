"""Placements of a simulated router that chooses workers itself, which admit or refuse.

The policy is the product's. The router knows each worker's room from the newest of

    replies     on its own streams: with each step that decodes for it, with a refusal, with an end
    the feed    from the scheduler: what workers told with their heartbeats, asked for once a second

and adds what it has under way itself. These messages are not simulated one by one: a worker keeps its changes
for a while, and a router looks up what was true when the last message that has reached it was sent.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice

from baton.attempts import Attempt
from baton.prefix_keys import PromptKeys
from baton.protos import scheduler_pb2 as pb
from baton.scheduler.booking import Assignment, blocks_for, claim, may_decode, may_prefill, waits_for_slot
from baton.scheduler.need import Need
from baton.scheduler.policy import NoChoice, Policy
from baton.scheduler.policy.base import Side
from baton.scheduler.policy.choose import HOLDERS, LOOKS, WorkerChoice
from baton.scheduler.prefixes.ledger import PrefixLedger
from baton.scheduler.prefixes.match import Match
from baton.scheduler.reporter import FLUSH_S
from baton.scheduler.servicer import SNAPSHOT_AGE_S
from baton.scheduler.types import FleetView, Reserved, WorkerRecord
from baton.services.config import SchedulerSettings
from baton.services.router.cluster import POLL_S
from baton.services.simulate.admission import Answer
from baton.services.simulate.booked import SimulatedPlacements, Wire, fullness, pause
from baton.services.simulate.deployment import Desk, SimulatedDeployment
from baton.services.simulate.worker import SimulatedWorker

SIDES = {pb.ROLE_PREFILL: Side.PREFILL, pb.ROLE_DECODE: Side.DECODE, pb.ROLE_MIXED: Side.BOTH}
Lists = Mapping[tuple[int, ...], "list[_Seen]"]  # workers by the roles for which policies ask


@dataclass(frozen=True)
class Choosing:
    """The way in which routers choose. All but the first are variations.

    tries: workers that may refuse a request, before it waits
    pushed: each worker tells all routers its room with each step
    expects: but for its last try, a worker refuses a request before which more waits than its router believes
    noted: routers tell the scheduler each choice, and hear of others' choices with the next look-up
    desks: so many schedulers choose. Each counts its own advice at once, hears of others' advice and of ends
        by messages, and keeps the order of requests that wait
    asked: so many workers of each role are drawn and asked for their room before the choice, as holders are
    together: both workers get the request at once: the decode worker's answer is not awaited
    """

    tries: int = 4
    pushed: bool = False
    expects: bool = False
    noted: bool = False
    desks: int = 0
    asked: int = 0
    together: bool = False


class _Seen(WorkerRecord):
    """A worker as one router knows it, brought up to date when the policy looks at it."""

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __init__(self, worker: SimulatedWorker, router: Chosen) -> None:
        self.identity = worker.identity
        self.state = pb.WORKER_STATE_READY
        self.drain_asked = False
        self.lease_left_s = 1.0
        self.epoch = 0
        self.worker = worker
        self.heard_at = 0.0  # when it last replied to this router, apart from the replies of steps
        self.sent = router.desk.sent.setdefault(worker.worker_id, Reserved())  # on its way there
        self._router = router
        self._choice = -1
        self._known: tuple[Reserved, pb.WorkerLoad | None] = Reserved(), None

    @property
    def reserved(self) -> Reserved:  # type: ignore[override]
        return self._look()[0]

    @property
    def load(self) -> pb.WorkerLoad | None:  # type: ignore[override]
        return self._look()[1]

    def _look(self) -> tuple[Reserved, pb.WorkerLoad | None]:
        if self._choice != self._router.choices:  # else it was looked at for this one
            self._choice = self._router.choices
            self._known = self._router.knowledge(self)
        return self._known


class _Holders(Match):
    """The scheduler's answer about one prompt: the workers that hold most of it are named once."""

    def __init__(self, ledger: PrefixLedger, prompt: PromptKeys, prompt_tokens: int) -> None:
        super().__init__(ledger, prompt, prompt_tokens)
        self._named: dict[int, list[str]] = {}

    def best(self, role: int, most: int, rng: random.Random) -> list[str]:
        if role not in self._named:
            self._named[role] = super().best(role, most, rng)
        return self._named[role]


@dataclass(slots=True)
class _Held:
    """The workers that were asked to take a request, and those that did."""

    decode: _Seen | None = None
    prefill: _Seen | None = None
    looked_at: float = 0.0  # the scheduler's answer came
    expects: bool = False  # it is to be refused where more waits than is believed
    expected: Reserved | None = None  # what is believed of the worker that is asked then
    waits: bool = False  # the decode worker had no slot free
    refused: set[str] = field(default_factory=set)  # by these workers
    keeps_elder: set[WorkerRecord] = field(default_factory=set)  # workers whose room an elder one has
    knocked: list[_Seen] = field(default_factory=list)  # workers that may keep its turn


class Chosen(SimulatedPlacements):
    """One router's choices."""

    tells_waits = True

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        name: str,
        deployment: SimulatedDeployment,
        settings: SchedulerSettings,
        *,
        wire: Wire,
        choosing: Choosing,
        seed: int,
        freed: Callable[[], None],
    ) -> None:
        """Choose workers of `deployment`. Raises BadPolicy.

        `freed` is called when a request has left a worker.
        """
        self._loop = loop
        self._name = name
        self._deployment = deployment
        self._settings = settings
        self._wire = wire
        self._choosing = choosing
        self._advised = choosing.desks > 0
        self._freed = freed
        self._rng = random.Random(f"{seed} {name}")  # noqa: S311 (no secret)
        self._policy = Policy(settings, settings.policy, self._rng)
        self._polls_at = self._rng.random() * POLL_S
        self._roster = -1  # of the deployment, when `_workers` was made
        self._workers: dict[str, _Seen] = {}
        self._by_roles: Lists = {}
        self._held: dict[str, _Held] = {}  # by request id
        while len(deployment.desks) < choosing.desks:
            deployment.desks.append(Desk())
        self.desk = self._rng.choice(deployment.desks) if choosing.desks else Desk()
        self.desk.routers.add(name)
        self._turns = deployment.placer.turns  # the scheduler's
        self._looked_at = 0.0  # the scheduler's answer for this choice came
        self.choices = 0
        self._refusals: Counter[str] = Counter()  # by request id

    async def place(self, need: Need) -> Assignment | NoChoice:
        held = self._begin(need.attempt.request_id)
        ledger = self._deployment.ledger
        if ledger is not None and need.prefix.keys:
            await pause(self._wire.look_up_s)
            need = replace(need, match=_Holders(ledger, need.prefix, need.prompt_tokens))
        held.looked_at = self._loop.time()
        refusal = NoChoice(pb.Rejection.CODE_FULL, "workers refused it")
        for left_tries in reversed(range(self._choosing.tries)):
            held.expects = self._choosing.expects and left_tries > 0
            left = replace(need, exclude=need.exclude | held.refused)
            choice = await self._choose(left, held)
            if isinstance(choice, NoChoice):
                refusal = choice
                if not self._choosing.asked:
                    break
            elif await self._start(left, choice, held):
                return self._assignment(need, held)
        self.end(need.attempt, "refused")
        self._turns.refused(need)
        return replace(refusal, code=pb.Rejection.CODE_FULL) if held.refused else refusal

    def prefilled(self, attempt: Attempt) -> None:
        held = self._held.get(attempt.request_id)
        if held is not None and held.prefill is not None and held.decode is not None:
            held.prefill.worker.admission.prefilled(attempt.request_id, decodes=False)
            held.decode.worker.admission.prefilled(attempt.request_id, decodes=True)
            self._replied(held.prefill)

    def end(self, attempt: Attempt, outcome: str) -> None:
        del outcome  # workers do not ask
        held = self._held.pop(attempt.request_id, None)
        if held is None:
            return
        for seen in filter(None, (held.prefill, held.decode)):
            seen.worker.admission.end(attempt.request_id)
            self._replied(seen)

    def take_refusals(self, request_id: str) -> int:
        return self._refusals.pop(request_id, 0)

    def knowledge(self, seen: _Seen) -> tuple[Reserved, pb.WorkerLoad | None]:
        """Return the room of a worker as this router knows it, and the load that it last told."""
        now, worker = self._loop.time(), seen.worker
        latest = now - self._wire.message_s
        choosing, noted_at = self._choosing, 0.0
        if choosing.noted or self._advised:  # the scheduler answered, and a message reached it before that
            noted_at = self._looked_at - self._wire.look_up_s / 2 - self._wire.message_s
        told_at, load = worker.told(noted_at or self._fed_at(latest))
        at = max(told_at, seen.heard_at, noted_at - FLUSH_S if self._advised else 0.0)
        if choosing.pushed or worker.admission.decodes_for(self._name):
            at = max(at, worker.engine.stepped_at(latest))
        known = worker.admission.as_of(at, self._name, latest, noted_at, self.desk.routers)
        known.add(seen.sent)
        return known, load

    # Choice.

    def _begin(self, request_id: str) -> _Held:
        """Leave the workers of an earlier attempt."""
        self.end(Attempt(request_id, 1), "retried")
        held = self._held[request_id] = _Held()
        return held

    async def _choose(self, need: Need, held: _Held) -> WorkerChoice | NoChoice:
        if self._roster != self._deployment.roster:
            self._learn_roster()
        by_roles = await self._ask(need, held) if self._choosing.asked else self._by_roles
        self.choices += 1
        self._looked_at = held.looked_at
        lists: dict[tuple[int, ...], list[WorkerRecord]] = {role: [*some] for role, some in by_roles.items()}
        choice = self._policy.choose(FleetView({**self._workers}, 0, 0, by_roles=lists), need)
        if isinstance(choice, WorkerChoice) and self._goes_behind(need, choice, held):
            return NoChoice(pb.Rejection.CODE_FULL, "an elder request goes first")
        return choice

    def _goes_behind(self, need: Need, choice: WorkerChoice, held: _Held) -> bool:
        """Return whether an elder request has the room that was found, as far as is known."""
        chosen = [one for one in (choice.prefill, choice.decode) if one is not None]
        if self._advised:
            return bool(self._turns.elder(need, {one.worker_id for one in chosen}))
        return not held.keeps_elder.isdisjoint(chosen)

    async def _ask(self, need: Need, held: _Held) -> Lists:
        """Ask some workers of each role for their room; return them by roles: others are not chosen."""
        asked: dict[pb.Role, list[_Seen]] = {}
        self.choices += 1
        for role, side in SIDES.items():
            drawn = self._draw(self._by_roles[role,], need, side)
            named = need.match.best(role, HOLDERS, self._rng) if need.match else []
            holders = [self._workers[one] for one in named if one in self._workers]
            asked[role] = [*drawn, *(one for one in holders if one not in drawn)]
        await pause(self._wire.message_s)
        for role, side in SIDES.items():
            self._deployment.questions += len(asked[role])
            for one in asked[role]:
                one.heard_at = self._loop.time()
                answer = one.worker.admission.answer(need, side)
                if answer is not Answer.ROOM:
                    held.knocked.append(one)
                (held.keeps_elder.add if answer is Answer.ELDER else held.keeps_elder.discard)(one)
        await pause(self._wire.message_s)
        both = asked[pb.ROLE_DECODE] + asked[pb.ROLE_MIXED]
        return {**{(role,): asked[role] for role in SIDES}, (pb.ROLE_DECODE, pb.ROLE_MIXED): both}

    def _draw(self, known: list[_Seen], need: Need, side: Side) -> list[_Seen]:
        """Draw workers to be asked, of those that have room as far as is known."""
        looked = self._rng.sample(known, min(LOOKS, len(known)))
        roomy = (
            one
            for one in looked
            if (Side.PREFILL not in side or may_prefill(need, one, self._settings))
            and (Side.DECODE not in side or may_decode(need, one, self._settings))
        )
        return list(islice(roomy, self._choosing.asked)) or looked[: self._choosing.asked]

    async def _start(self, need: Need, choice: WorkerChoice, held: _Held) -> bool:
        """Ask the chosen workers to take a request, the decode worker first; return whether they did."""
        prefill, decode = choice.prefill, choice.decode
        computed = need.tokens_for((prefill or decode).worker_id)
        blocks = blocks_for(need, decode.capacity)
        if prefill is None:
            if held.decode is not None:
                held.decode.worker.admission.end(need.attempt.request_id)
                held.decode = None
            return await self._send(need, decode, Side.BOTH, Reserved(computed, 1, blocks), held)
        share, queued = Reserved(requests=1, blocks=blocks), Reserved(computed, 1)
        if held.decode is not None:
            return await self._send(need, prefill, Side.PREFILL, queued, held)
        if not self._choosing.together:
            if not await self._send(need, decode, Side.DECODE, share, held):
                return False
            await pause(self._wire.message_s)  # its answer
            return await self._send(need, prefill, Side.PREFILL, queued, held)
        both = await asyncio.gather(
            self._send(need, decode, Side.DECODE, share, held),
            self._send(need, prefill, Side.PREFILL, queued, held),
        )
        if held.prefill is not None and held.decode is None:  # it computes for nobody
            held.prefill.worker.admission.end(need.attempt.request_id)
            held.prefill = None
        return all(both)

    def _send(
        self, need: Need, to: WorkerRecord, side: Side, share: Reserved, held: _Held
    ) -> Awaitable[bool]:
        """Ask a worker to take a request, which counts from now on. Return whether it did."""
        assert isinstance(to, _Seen)  # noqa: S101
        held.expected = to.reserved if held.expects else None
        to.sent.add(share)
        return self._arrive(need, to, side, share, held)

    async def _arrive(self, need: Need, to: _Seen, side: Side, share: Reserved, held: _Held) -> bool:
        """Return when the worker has taken the request, or when its refusal is here."""
        try:
            await pause(self._wire.message_s)
        finally:
            to.sent.take(share)
        admission = to.worker.admission
        waits = waits_for_slot(admission.record)
        if to.worker.alive and admission.take(need, side, share, held.expected, in_turn=not self._advised):
            if side is Side.PREFILL:
                held.prefill = to
            else:
                held.decode, held.waits = to, waits
            full = fullness(admission.record.reserved, to.capacity, self._settings)
            self._deployment.fullest = max(self._deployment.fullest, full)
            return True
        heard_at = self._loop.time()
        await pause(self._wire.message_s)
        to.heard_at = heard_at
        if not held.expects:
            held.refused.add(to.worker_id)
        held.knocked.append(to)
        self._refusals[need.attempt.request_id] += 1
        return False

    def _assignment(self, need: Need, held: _Held) -> Assignment:
        """Return what was chosen. Those that refused it need not keep its turn."""
        assert held.decode is not None  # noqa: S101
        self._turns.placed(need)
        for seen in held.knocked:
            self._loop.call_later(self._wire.message_s, seen.worker.admission.turns.placed, need)
        booking = claim(need, held.prefill, held.decode, self._settings).booking
        prompt_worker = (held.prefill or held.decode).worker_id
        knows = need.match is not None and need.match.knows(prompt_worker)
        known = need.prompt_tokens - need.tokens_for(prompt_worker) if knows else None
        return Assignment(held.prefill, held.decode, booking, known, held.waits)

    # Knowledge.

    def _fed_at(self, latest: float) -> float:
        """Return the moment of the scheduler's view that this router has."""
        polled_at = self._polls_at + POLL_S * math.floor((latest - self._polls_at) / POLL_S)
        return SNAPSHOT_AGE_S * math.floor(polled_at / SNAPSHOT_AGE_S)

    def _replied(self, seen: _Seen) -> None:
        """Let a worker's word reach this router that a request has left it."""
        seen_at = self._loop.time()

        def hear() -> None:
            seen.heard_at = max(seen.heard_at, seen_at)
            self._freed()

        self._loop.call_later(self._wire.message_s, hear)

    def _learn_roster(self) -> None:
        self._roster = self._deployment.roster
        known = self._workers
        self._workers = {
            key: known.get(key) or _Seen(worker, self) for key, worker in self._deployment.workers.items()
        }
        by_role = {role: [one for one in self._workers.values() if one.role == role] for role in SIDES}
        both = by_role[pb.ROLE_DECODE] + by_role[pb.ROLE_MIXED]
        self._by_roles = {**{(role,): by_role[role] for role in SIDES}, (pb.ROLE_DECODE, pb.ROLE_MIXED): both}
