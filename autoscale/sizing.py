"""Compute the minimum numbers of workers that meet the goals. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.autoscale.capacity import Capacity, Gap
from baton.autoscale.demand import Demand
from baton.autoscale.goals import TARGET, Bounds, Goals
from baton.autoscale.queueing import first_tokens_within, gaps_within, requests_each
from baton.autoscale.seen import Member
from baton.protos import scheduler_pb2 as pb

CLEAR_S = 5.0  # s; a longer queue than usual should be gone after this
FULL = 0.9  # share of decode slots in use above which requests in routers count as waiting for decode


@dataclass(frozen=True, slots=True)
class Counts:
    """Numbers of workers by role."""

    prefill: int
    decode: int

    def of(self, role: pb.Role) -> int:
        return self.prefill if role == pb.ROLE_PREFILL else self.decode

    def __str__(self) -> str:
        return f"{self.prefill} prefill + {self.decode} decode"


@dataclass(frozen=True, slots=True)
class Shares:
    """The share of requests within each goal; None while unknown."""

    first_token: float | None
    gap: float | None


@dataclass(frozen=True, slots=True)
class Work:
    """The work of all workers, in seconds of one worker. None: no worker of that side has worked yet."""

    prompts: Sequence[tuple[float, float]] | None  # prefill seconds of a prompt, share of the requests
    prefill_load: float  # prefill seconds arriving per second, including the backlog
    backlog_s: float  # prefill seconds for one worker
    tokens_per_s: float  # output tokens to generate
    decoding: float  # requests on decode workers
    gap: Gap | None
    most: float  # requests per decode worker with which gaps meet the goal

    def within(self, counts: Counts, goals: Goals) -> Shares:
        """Return the shares of requests that this many workers would serve within the goals."""
        return Shares(self._first_tokens(counts.prefill, goals), self._gaps(counts.decode))

    def _first_tokens(self, workers: int, goals: Goals) -> float | None:
        if self.prompts is None or workers == 0:
            return None
        return first_tokens_within(goals.first_token_s, self.prompts, self.prefill_load, workers)

    def _gaps(self, workers: int) -> float | None:
        if self.gap is None or workers == 0:
            return None
        each = requests_each(self.gap, self.tokens_per_s, workers)
        # Overloaded: answers are longer than those that ended so far, or requests pile up.
        if self.decoding > self.most * workers:
            each = max(each, self.decoding / workers)
        return gaps_within(self.most, each)

    def wanted(self, goals: Goals, present: Counts, room: int) -> Counts:
        """Return the minimum numbers that meet the goals, within their bounds and `room` workers in all.

        A side without known figures keeps its number; one without demand gets its minimum. A goal that no
        number of workers can meet (because a single prompt takes longer) is met as far as possible.
        """
        possible = sum(share for s, share in self.prompts or () if s < goals.first_token_s)

        def prefills(workers: int) -> bool:
            return (self._first_tokens(workers, goals) or 0.0) >= TARGET * possible

        prefill = (
            _stay(goals.prefill, present.prefill) if self.prompts is None else _least(goals.prefill, prefills)
        )
        decode = (
            _stay(goals.decode, present.decode)
            if self.gap is None
            else _least(goals.decode, lambda workers: (self._gaps(workers) or 0.0) >= TARGET)
        )
        return self._fit(Counts(prefill, decode), goals, room)

    def _fit(self, counts: Counts, goals: Goals, room: int) -> Counts:
        """Reduce the numbers, from the side that needs them least, until all workers have room."""
        while counts.prefill + counts.decode > room:
            fewer = []
            if counts.prefill > goals.prefill.least:
                fewer.append(Counts(counts.prefill - 1, counts.decode))
            if counts.decode > goals.decode.least:
                fewer.append(Counts(counts.prefill, counts.decode - 1))
            if not fewer:
                break
            counts = max(fewer, key=lambda one: _worse(self.within(one, goals)))
        return counts


def work(demand: Demand, capacity: Capacity, decodes: Sequence[Member], queued: int, goals: Goals) -> Work:
    """Return the work caused by `demand`. `queued`: prompt tokens placed and not prefilled yet."""
    slots = sum(one.slots for one in decodes)
    decoding = sum(one.load.running + one.load.waiting for one in decodes)
    full = decoding >= FULL * slots if slots else False
    prompts, load, backlog_s = None, 0.0, 0.0
    if capacity.tokens_per_s:
        each_s = capacity.uncached / capacity.tokens_per_s  # seconds per prompt token
        prompts = [(tokens * each_s, share) for tokens, share in demand.prompts]
        mean = demand.prompt_tokens_per_s / demand.requests_per_s if demand.requests_per_s > 1e-9 else 0.0
        backlog_s = (queued + (0 if full else demand.waiting * mean)) * each_s
        load = demand.prompt_tokens_per_s * each_s
        load += max(0.0, backlog_s - load * goals.first_token_s) / CLEAR_S
    most = capacity.slots
    if capacity.gap is not None and (by_goal := capacity.gap.most(goals.gap_s)) >= 1:
        most = min(most, by_goal)
    return Work(
        prompts,
        load,
        backlog_s,
        demand.requests_per_s * demand.output_tokens,
        decoding,
        capacity.gap,
        most,
    )


def _least(bounds: Bounds, enough: Callable[[int], bool]) -> int:
    """Return the smallest number within bounds that is enough, or the maximum. More is never worse."""
    low, high = bounds.least, bounds.most
    while low < high:
        middle = (low + high) // 2
        if enough(middle):
            high = middle
        else:
            low = middle + 1
    return low


def _stay(bounds: Bounds, present: int) -> int:
    return min(max(present, bounds.least), bounds.most)


def _worse(shares: Shares) -> float:
    return min(1.0 if share is None else share for share in (shares.first_token, shares.gap))
