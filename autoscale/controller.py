"""Decide at intervals: scale up at once, scale down after a delay, and check earlier predictions.

The wanted numbers are those that the present demand needs. More workers are ordered at once. A worker is
removed only if fewer would have sufficed for `down_after_s` without a break: the highest number wanted in
that time counts, as in Kubernetes' HorizontalPodAutoscaler. A role changes if one side is short and the other
could spare a worker for `flip_after_s`: that takes a second, whereas a new worker must load its model. A
worker that has changed its role keeps the new one for at least as long.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from baton.autoscale.capacity import CapacityMeter
from baton.autoscale.demand import Demand, DemandMeter, Totals
from baton.autoscale.goals import Goals
from baton.autoscale.histogram import SECONDS, share_below
from baton.autoscale.orders import OTHER, SCALED, Draft
from baton.autoscale.seen import Member, Plan, Seen
from baton.autoscale.sizing import Counts, Work, work
from baton.enums import role_name
from baton.protos import scheduler_pb2 as pb

AHEAD_S = 30.0  # s; how far ahead figures are predicted
START_S = 600.0  # s; an ordered worker that has not registered by then is given up


@dataclass(frozen=True, slots=True)
class Outlook:
    """A period's figures, predicted or actual; None where unknown."""

    requests_per_s: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    first_token_within: float | None  # share of requests within the goal
    gap_within: float | None

    def errors(self, came: Outlook) -> dict[str, float]:
        """Return the prediction's errors: in percent of the actual value, or in percentage points."""
        found = {}
        for name in ("requests_per_s", "prompt_tokens_per_s", "output_tokens_per_s"):
            if real := getattr(came, name):
                found[name] = 100 * abs(getattr(self, name) - real) / real
        for name in ("first_token_within", "gap_within"):
            mine, real = getattr(self, name), getattr(came, name)
            if mine is not None and real is not None:
                found[name] = 100 * abs(mine - real)
        return found


@dataclass(frozen=True, slots=True)
class Settled:
    """An expired prediction, and the actual figures."""

    predicted: Outlook
    came: Outlook


@dataclass(frozen=True, slots=True)
class Decision:
    """The outcome of one step."""

    present: Counts
    wanted: Counts
    flips: list[tuple[Member, pb.Role]]
    starts: list[tuple[str, pb.Role]]  # place, role
    stops: list[Member]
    plan: Plan
    changed: bool  # the plan differs from the one in force
    backlog_s: float  # prefill seconds queued per worker
    occupancy: float  # share of the decode workers' batches in use
    settled: Settled | None

    @property
    def orders(self) -> str:
        """The orders in words, for people; empty if there are none."""
        said = [f"{one.worker_id} becomes a {role_name(role)} worker" for one, role in self.flips]
        said += [f"{place} starts ({role_name(role)})" for place, role in self.starts]
        said += [f"{one.worker_id} drains and ends ({role_name(one.role)})" for one in self.stops]
        return "; ".join(said)


@dataclass(slots=True)
class _Forecast:
    outlook: Outlook
    totals: Totals


@dataclass(slots=True)
class Controller:
    """Decide for one deployment. Its state is learned again by the next scheduler to decide."""

    goals: Goals
    _demand: DemandMeter = field(default_factory=DemandMeter)
    _capacity: CapacityMeter = field(default_factory=CapacityMeter)
    _history: deque[tuple[float, Counts]] = field(default_factory=deque)
    _flipped: dict[str, float] = field(default_factory=dict)  # worker -> time of its role change
    _coming: dict[str, float] = field(default_factory=dict)  # place that awaits a worker -> since when
    _barred: dict[str, float] = field(default_factory=dict)  # place in which no worker came up -> until when
    _forecast: _Forecast | None = None

    def step(self, seen: Seen) -> Decision:
        """Decide. Call it about every `interval_s`; it costs some microseconds per worker and router."""
        demand = self._demand.take(seen.at, seen.routers)
        capacity = self._capacity.take(seen.at, seen.members)
        decodes = seen.of(pb.ROLE_DECODE)
        todo = work(demand, capacity, seen.members, self.goals)
        self._expire(seen.at)
        draft = Draft(seen, self._barred)
        self._give_up(draft)
        present = draft.present()
        room = present.prefill + present.decode + len(draft.empty(OTHER))
        if self.goals.mode == "advise":  # even if no fleet could follow the advice
            room = self.goals.prefill.most + self.goals.decode.most
        wanted = todo.wanted(self.goals, present, room)
        self._order(draft, self._remember(seen.at, present, wanted), wanted)
        ready = Counts(len(seen.of(pb.ROLE_PREFILL)), len(decodes))
        slots = sum(one.slots for one in decodes)
        return Decision(
            present=present,
            wanted=wanted,
            flips=draft.flips,
            starts=draft.starts,
            stops=draft.stops,
            plan=draft.plan,
            changed=draft.plan != seen.plan,
            backlog_s=todo.prompts.backlog_s / max(1, ready.prefill) if todo.prompts else 0.0,
            occupancy=sum(one.load.running for one in decodes) / slots if slots else 0.0,
            settled=self._predict(demand, todo, ready),
        )

    def _order(self, draft: Draft, spare: Counts, wanted: Counts) -> None:
        """Draft the orders. `spare`: workers that each side has not needed for `flip_after_s`."""
        present = draft.present()
        for role in SCALED:
            short, able = wanted.of(role) - present.of(role), spare.of(OTHER[role]) if role in OTHER else 0
            if short > 0 and able > 0:
                draft.flip(role, min(short, able), self._flipped)
                self._flipped.update((one.worker_id, draft.seen.at) for one, _ in draft.flips)
            draft.start(role, wanted.of(role) - draft.present().of(role))
        present = draft.present()
        kept = self._most(draft.seen.at, self.goals.down_after_s)
        for role in SCALED if self.goals.encode.most else OTHER:
            bounds = self.goals.bounds(role)
            draft.stop(role, present.of(role) - max(kept.of(role), bounds.least), bounds)

    def _remember(self, at: float, present: Counts, wanted: Counts) -> Counts:
        """Record the wanted numbers; return how many workers each side could spare for `flip_after_s`."""
        if not self._history:  # no history: assume that all present workers were needed
            self._history.append((at, present))
        self._history.append((at, wanted))
        while len(self._history) > 1 and self._history[1][0] <= at - self.goals.down_after_s:
            self._history.popleft()
        lately = self._most(at, self.goals.flip_after_s)
        return Counts(max(0, present.prefill - lately.prefill), max(0, present.decode - lately.decode))

    def _most(self, at: float, within_s: float) -> Counts:
        """Return the highest numbers wanted in the last `within_s`; an entry counts until the next one."""
        most = Counts(0, 0)
        for when, counts in reversed(self._history):
            most = Counts(*(max(most.of(role), counts.of(role)) for role in SCALED))
            if when <= at - within_s:
                break
        return most

    def _expire(self, at: float) -> None:
        for table, since in ((self._flipped, at - self.goals.flip_after_s), (self._barred, at)):
            for key in [key for key, when in table.items() if when < since]:
                del table[key]

    def _give_up(self, draft: Draft) -> None:
        """Cancel orders for workers that never registered; their places stay empty for `START_S` more."""
        at = draft.seen.at
        coming = {name for role in SCALED for name in draft.coming(role)}
        self._coming = {name: self._coming.get(name, at) for name in coming}
        for name, since in self._coming.items():
            if since < at - START_S:
                draft.remove(name)
                self._barred[name] = at + START_S

    def _predict(self, demand: Demand, todo: Work, ready: Counts) -> Settled | None:
        """When the last prediction has expired, replace it, and return it with the actual figures."""
        totals = self._demand.totals
        settled = None
        if self._forecast is not None:
            new = totals.since(self._forecast.totals)
            if new.at < AHEAD_S:
                return None
            came = Outlook(
                new.requests / new.at,
                new.load.prompt_tokens / new.at,
                new.load.output_tokens / new.at,
                share_below(new.load.first_token, SECONDS, self.goals.first_token_s),
                share_below(new.load.gap, SECONDS, self.goals.gap_s),
            )
            settled = Settled(self._forecast.outlook, came)
        shares = todo.within(ready, self.goals)
        outlook = Outlook(
            demand.requests_per_s,
            demand.prompt_tokens_per_s,
            demand.requests_per_s * demand.output_tokens,
            shares.first_token,
            shares.gap,
        )
        self._forecast = _Forecast(outlook, totals)
        return settled
