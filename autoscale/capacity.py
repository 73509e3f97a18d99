"""The speed of workers, learned while they work.

Workers count what they computed and how long their steps took, so a rate is known however idle they are. All
workers of a role are treated as equal.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from baton.autoscale.seen import Member
from baton.protos import scheduler_pb2 as pb

FORGET_S = 300.0  # s; the time constant with which old figures lose weight
SPREAD = 1.0  # requests; with less spread of batch sizes the prior slope dominates


@dataclass(frozen=True, slots=True)
class Gap:
    """Model the gap between an answer's tokens on a worker with n requests: `base + slope * n`, s."""

    base: float
    slope: float

    def at(self, requests: float) -> float:
        return self.base + self.slope * requests

    def most(self, goal_s: float) -> float:
        return (goal_s - self.base) / self.slope


@dataclass(frozen=True, slots=True)
class Capacity:
    """The speed of each role's workers; None while no worker of the role has worked yet."""

    tokens_per_s: float | None  # computed by one prefill worker
    uncached: float  # share of prompt tokens computed rather than found in a prefix cache
    gap: Gap | None
    slots: float  # maximum requests of a decode worker; 0: unknown
    image_tokens_per_s: float | None = None  # computed by one encode worker
    new_images: float = 1.0  # share of images computed rather than found at an encode worker


class _Fading:
    """Sums in which earlier figures lose weight."""

    def __init__(self, number: int) -> None:
        self.sums = [0.0] * number

    def fade(self, keep: float) -> None:
        self.sums = [keep * one for one in self.sums]

    def add(self, *more: float) -> None:
        self.sums = [one + new for one, new in zip(self.sums, more, strict=True)]


class _Speed(_Fading):
    """Sum up what a role's workers did.

    The sums: tokens, seconds at work, prompt tokens or images computed, and those found in a cache.
    """

    def __init__(self) -> None:
        super().__init__(4)

    @property
    def tokens_per_s(self) -> float | None:
        tokens, busy_s, _, _ = self.sums
        return tokens / busy_s if tokens and busy_s else None

    @property
    def new(self) -> float:
        """The share that was computed."""
        _, _, computed, found = self.sums
        return computed / (computed + found) if computed else 1.0


class _Fit(_Fading):
    """Sum up a weighted regression of gaps (y) on batches (n): weight, n, y, n * n, n * y."""

    def __init__(self) -> None:
        super().__init__(5)

    def see(self, weight: float, n: float, y: float) -> None:
        self.add(weight, weight * n, weight * y, weight * n * n, weight * n * y)

    def line(self, slots: float) -> Gap | None:
        """Return the least-squares line, shrunk towards a prior slope; None before there are figures.

        The prior has a full batch take twice as long as one request. It keeps the result meaningful while all
        batches seen were of one size.
        """
        weight = self.sums[0]
        if not weight or not slots:
            return None
        n, y, nn, ny = (one / weight for one in self.sums[1:])
        spread = max(0.0, nn - n * n)
        together = ny - n * y
        prior = y / (slots + n)
        slope = max((together + SPREAD * prior) / (spread + SPREAD), 0.01 * prior)
        base = y - slope * n
        return Gap(base, slope) if base > 0 else Gap(0.0, y / n)


@dataclass(slots=True)
class CapacityMeter:
    """Learn from each worker's counts since the last step. A step costs a few subtractions per worker."""

    _last: dict[str, tuple[pb.Role, pb.WorkerLoad]] = field(default_factory=dict)
    _at: float | None = None
    _prefill: _Speed = field(default_factory=_Speed)
    _encode: _Speed = field(default_factory=_Speed)
    _fit: _Fit = field(default_factory=_Fit)
    _slots: float = 0.0

    def take(self, at: float, members: Iterable[Member]) -> Capacity:
        """Learn from what was counted since the last call."""
        keep = math.exp((self._at - at) / FORGET_S) if self._at is not None else 1.0
        self._at = at
        for one in (self._prefill, self._encode, self._fit):
            one.fade(keep)
        counted = {}
        slots = []
        for member in members:
            now = member.load
            counted[member.worker_id] = (member.role, now)
            role, before = self._last.get(member.worker_id, (None, now))
            if role == member.role:
                self._learn(role, now, before)
            if member.role == pb.ROLE_DECODE and member.ready:
                slots.append(member.slots)
        self._last = counted
        if slots:
            self._slots = sum(slots) / len(slots)
        return Capacity(
            self._prefill.tokens_per_s,
            self._prefill.new,
            self._fit.line(self._slots),
            self._slots,
            self._encode.tokens_per_s,
            self._encode.new,
        )

    def _learn(self, role: pb.Role, load: pb.WorkerLoad, earlier: pb.WorkerLoad) -> None:
        now, before = load.counts, earlier.counts
        busy_s = now.busy_s - before.busy_s
        computed = now.computed_tokens - before.computed_tokens
        if role == pb.ROLE_ENCODE:  # a worker that finds all images has no busy_s
            images, kept = load.embeddings, earlier.embeddings
            self._encode.add(computed, busy_s, images.computed - kept.computed, images.found - kept.found)
            return
        if busy_s <= 0:
            return
        if role == pb.ROLE_PREFILL:
            self._prefill.add(computed, busy_s, computed, now.prefix_hits - before.prefix_hits)
            return
        tokens = now.output_tokens - before.output_tokens
        request_s = now.request_s - before.request_s
        # else it prefilled, and its gaps say little about decoding
        if tokens and request_s and computed <= tokens:
            self._fit.see(busy_s, request_s / busy_s, request_s / tokens)
