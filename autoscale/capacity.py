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


@dataclass(slots=True)
class _Fit:
    """Sum up a weighted regression of gaps on batches."""

    weight: float = 0.0
    n: float = 0.0
    y: float = 0.0
    nn: float = 0.0
    ny: float = 0.0

    def fade(self, keep: float) -> None:
        self.weight, self.n, self.y = keep * self.weight, keep * self.n, keep * self.y
        self.nn, self.ny = keep * self.nn, keep * self.ny

    def add(self, weight: float, requests: float, gap: float) -> None:
        self.weight += weight
        self.n += weight * requests
        self.y += weight * gap
        self.nn += weight * requests * requests
        self.ny += weight * requests * gap

    def line(self, slots: float) -> Gap:
        """Return the least-squares line, shrunk towards a prior slope.

        The prior has a full batch take twice as long as one request. It keeps the result meaningful while all
        batches seen were of one size.
        """
        n, y = self.n / self.weight, self.y / self.weight
        spread = max(0.0, self.nn / self.weight - n * n)
        together = self.ny / self.weight - n * y
        prior = y / (slots + n)
        slope = max((together + SPREAD * prior) / (spread + SPREAD), 0.01 * prior)
        base = y - slope * n
        return Gap(base, slope) if base > 0 else Gap(0.0, y / n)


@dataclass(slots=True)
class CapacityMeter:
    """Learn from each worker's counts since the last step. A step costs a few subtractions per worker."""

    _last: dict[str, tuple[pb.Role, pb.EngineCounts]] = field(default_factory=dict)
    _at: float | None = None
    _computed: float = 0.0  # prompt tokens computed by prefill workers
    _found: float = 0.0  # prompt tokens found in their prefix caches
    _busy: float = 0.0  # s
    _fit: _Fit = field(default_factory=_Fit)
    _slots: float = 0.0

    def take(self, at: float, members: Iterable[Member]) -> Capacity:
        """Learn from what was counted since the last call."""
        keep = math.exp((self._at - at) / FORGET_S) if self._at is not None else 1.0
        self._at = at
        self._computed, self._found, self._busy = keep * self._computed, keep * self._found, keep * self._busy
        self._fit.fade(keep)
        counted = {}
        slots = []
        for one in members:
            now = one.load.counts
            counted[one.worker_id] = (one.role, now)
            role, before = self._last.get(one.worker_id, (None, now))
            if role == one.role and now.busy_s > before.busy_s:
                self._learn(one.role, now, before)
            if one.role == pb.ROLE_DECODE and one.ready:
                slots.append(one.slots)
        self._last = counted
        if slots:
            self._slots = sum(slots) / len(slots)
        return Capacity(
            self._computed / self._busy if self._computed and self._busy else None,
            self._computed / (self._computed + self._found) if self._computed else 1.0,
            self._fit.line(self._slots) if self._fit.weight and self._slots else None,
            self._slots,
        )

    def _learn(self, role: pb.Role, now: pb.EngineCounts, before: pb.EngineCounts) -> None:
        busy_s = now.busy_s - before.busy_s
        computed = now.computed_tokens - before.computed_tokens
        if role == pb.ROLE_PREFILL:
            self._computed += computed
            self._found += now.prefix_hits - before.prefix_hits
            self._busy += busy_s
            return
        tokens = now.output_tokens - before.output_tokens
        request_s = now.request_s - before.request_s
        # else it prefilled, and its gaps say little about decoding
        if tokens and request_s and computed <= tokens:
            self._fit.add(busy_s, request_s / busy_s, request_s / tokens)
