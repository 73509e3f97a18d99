"""Compute the minimum numbers of workers that meet the goals. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from baton.autoscale.capacity import Capacity, Gap
from baton.autoscale.demand import Demand
from baton.autoscale.goals import TARGET, Bounds, Goals
from baton.autoscale.queueing import first_tokens_within, gaps_within, requests_each
from baton.autoscale.seen import Member
from baton.protos import scheduler_pb2 as pb

CLEAR_S = 5.0  # s; a longer queue than usual should be gone after this
FULL = 0.9  # share of decode slots in use above which requests in routers count as waiting for decode
ENCODE_SHARE = 0.5  # share of the time to the first token in which images should be encoded
FEW = 0.05  # s of encode work arriving per second; below this, the prompts' workers may encode the images


@dataclass(frozen=True, slots=True)
class Counts:
    """Numbers of workers by role."""

    prefill: int
    decode: int
    encode: int = 0

    def of(self, role: pb.Role) -> int:
        return {pb.ROLE_PREFILL: self.prefill, pb.ROLE_DECODE: self.decode}.get(role, self.encode)

    def __str__(self) -> str:
        encode = f" + {self.encode} encode" if self.encode else ""
        return f"{self.prefill} prefill + {self.decode} decode{encode}"


@dataclass(frozen=True, slots=True)
class Shares:
    """The share of requests within each goal; None while unknown."""

    first_token: float | None
    gap: float | None


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Prompts or images to compute, measured in worker-seconds."""

    sizes: Sequence[tuple[float, float]]  # seconds that one takes, share of all
    load: float  # seconds arriving per second, including the backlog
    backlog_s: float

    def within(self, workers: int, goal_s: float) -> float:
        return first_tokens_within(goal_s, self.sizes, self.load, workers) if workers else 0.0

    def least(self, bounds: Bounds, goal_s: float) -> int:
        """Return the minimum number of workers for the goal.

        If no number meets the goal, because one prompt or image takes longer, it is met as far as possible.
        """
        possible = sum(share for seconds, share in self.sizes if seconds < goal_s)
        return _least(bounds, lambda workers: self.within(workers, goal_s) >= TARGET * possible)


@dataclass(frozen=True, slots=True)
class Work:
    """The work of all workers. None: no worker of that side has worked yet."""

    prompts: Arrivals | None
    images: Arrivals | None
    has_images: bool
    tokens_per_s: float  # output tokens to generate
    decoding: float  # requests on decode workers
    gap: Gap | None
    most: float  # requests per decode worker with which gaps meet the goal

    def within(self, counts: Counts, goals: Goals) -> Shares:
        """Return the shares of requests that this many workers would serve within the goals."""
        first_token = None
        if self.prompts is not None and counts.prefill:
            first_token = self.prompts.within(counts.prefill, goals.first_token_s)
        return Shares(first_token, self._gaps(counts.decode))

    def _gaps(self, workers: int) -> float | None:
        if self.gap is None or workers == 0:
            return None
        each = requests_each(self.gap, self.tokens_per_s, workers)
        # Overloaded: answers are longer than those that have ended so far, or requests pile up.
        if self.decoding > self.most * workers:
            each = max(each, self.decoding / workers)
        return gaps_within(self.most, each)

    def wanted(self, goals: Goals, present: Counts, room: int) -> Counts:
        """Return the minimum numbers that meet the goals, within their bounds.

        `room`: limit of prefill and decode workers together. A side without known figures keeps its number;
        a side without demand gets its minimum.
        """
        prefill = (
            _stay(goals.prefill, present.prefill)
            if self.prompts is None
            else self.prompts.least(goals.prefill, goals.first_token_s)
        )
        decode = (
            _stay(goals.decode, present.decode)
            if self.gap is None
            else _least(goals.decode, lambda workers: (self._gaps(workers) or 0.0) >= TARGET)
        )
        return self._fit(Counts(prefill, decode, self._encode(goals, present.encode)), goals, room)

    def _encode(self, goals: Goals, present: int) -> int:
        bounds = goals.encode
        if not bounds.most:
            return present
        if self.images is None:  # one worker is enough to measure how fast they are
            return _stay(bounds, max(present, int(self.has_images)))
        if self.images.load < FEW:
            return bounds.least
        return self.images.least(
            replace(bounds, least=max(1, bounds.least)), ENCODE_SHARE * goals.first_token_s
        )

    def _fit(self, counts: Counts, goals: Goals, room: int) -> Counts:
        """Reduce the numbers, on the side that needs its workers least, until all workers have room."""
        while counts.prefill + counts.decode > room:
            fewer = []
            if counts.prefill > goals.prefill.least:
                fewer.append(replace(counts, prefill=counts.prefill - 1))
            if counts.decode > goals.decode.least:
                fewer.append(replace(counts, decode=counts.decode - 1))
            if not fewer:
                break
            counts = max(fewer, key=lambda one: _worse(self.within(one, goals)))
        return counts


def work(demand: Demand, capacity: Capacity, members: Sequence[Member], goals: Goals) -> Work:
    """Return the work caused by `demand`, and the work queued at `members`."""
    queued_images = sum(one.queued_tokens for one in members if one.role == pb.ROLE_ENCODE)
    queued = sum(one.queued_tokens for one in members) - queued_images
    decodes = [one for one in members if one.role == pb.ROLE_DECODE and one.ready]
    slots = sum(one.slots for one in decodes)
    decoding = sum(one.load.running + one.load.waiting for one in decodes)
    full = decoding >= FULL * slots if slots else False
    prompts = images = None
    if capacity.tokens_per_s:
        mean = demand.prompt_tokens_per_s / demand.requests_per_s if demand.requests_per_s > 1e-9 else 0.0
        queued_tokens = queued + (0 if full else demand.waiting * mean)
        each_s = capacity.uncached / capacity.tokens_per_s
        prompts = _arrivals(
            demand.prompts, demand.prompt_tokens_per_s, queued_tokens, each_s, goals.first_token_s
        )
    if capacity.image_tokens_per_s:
        goal_s = ENCODE_SHARE * goals.first_token_s
        each_s = capacity.new_images / capacity.image_tokens_per_s
        images = _arrivals(demand.images, demand.image_tokens_per_s, queued_images, each_s, goal_s)
    most = capacity.slots
    if capacity.gap is not None and (by_goal := capacity.gap.most(goals.gap_s)) >= 1:
        most = min(most, by_goal)
    return Work(
        prompts,
        images,
        bool(demand.images),
        demand.requests_per_s * demand.output_tokens,
        decoding,
        capacity.gap,
        most,
    )


def _arrivals(
    sizes: Sequence[tuple[float, float]], tokens_per_s: float, queued: float, each_s: float, goal_s: float
) -> Arrivals:
    """sizes: tokens of a prompt or an image, share of all; each_s: seconds of one worker per token."""
    backlog_s, load = queued * each_s, tokens_per_s * each_s
    load += max(0.0, backlog_s - load * goal_s) / CLEAR_S
    return Arrivals([(tokens * each_s, share) for tokens, share in sizes], load, backlog_s)


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
