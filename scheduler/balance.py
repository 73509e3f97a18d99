"""Decide when a worker should change its role: one side is overloaded and the other has a worker to spare.

A side's pressure is its work relative to its capacity: queued prompt tokens over the token budget of a step,
or requests over the batch size (or KV blocks in use). Requests only booked on a decode worker do not count. A
worker, or a gang, changes sides when one side's pressure stayed high for `after_s` and the other, without it,
would be at ease and have room for its bookings. Then the whole deployment pauses for `PAUSE` * `after_s`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from baton.protos import scheduler_pb2 as pb
from baton.scheduler.booking import usable_blocks
from baton.scheduler.metrics import role_of
from baton.scheduler.types import FleetView, WorkerRecord

HIGH_PREFILL = 2.0  # steps' worth of queued prompts per prefill worker
HIGH_DECODE = 0.9  # share of the batches or of the KV caches
EASE_PREFILL = 0.5
EASE_DECODE = 0.6
PAUSE = 3.0  # multiple of `after_s`


@dataclass(frozen=True, slots=True)
class Flip:
    """A change that is due: `worker`, with its gang, should take `role`."""

    worker: WorkerRecord
    role: pb.Role
    why: str


@dataclass(frozen=True, slots=True)
class _Side:
    role: pb.Role
    units: list[list[WorkerRecord]]  # workers alone, and gangs

    @property
    def workers(self) -> list[WorkerRecord]:
        return [one for unit in self.units for one in unit]

    @property
    def idlest(self) -> list[WorkerRecord]:
        """The workers that can be spared first."""
        return min(
            self.units,
            key=lambda unit: (
                sum(one.reserved.requests for one in unit),
                sum(one.reserved.prompt_tokens for one in unit),
            ),
        )

    def pressure(self, fewer: int = 0) -> float:
        """Return the pressure if this side lost `fewer` workers."""
        workers = self.workers
        share = len(workers) / (len(workers) - fewer)
        return share * (_queued(workers) if self.role == pb.ROLE_PREFILL else _used(workers))

    @property
    def high(self) -> bool:
        return self.pressure() >= (HIGH_PREFILL if self.role == pb.ROLE_PREFILL else HIGH_DECODE)

    @property
    def can_spare(self) -> bool:
        if len(self.units) < 2:
            return False
        ease = EASE_PREFILL if self.role == pb.ROLE_PREFILL else EASE_DECODE
        workers, fewer = self.workers, len(self.idlest)
        room = 1 - fewer / len(workers)
        return self.pressure(fewer) <= ease and _booked(workers) <= room


class Balance:
    """Watch how long each side has been under pressure."""

    def __init__(self, after_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._after_s = after_s
        self._clock = clock
        self._since: dict[pb.Role, float] = {}  # role that is short of workers -> since when
        self._pause_until = 0.0

    def start_over(self) -> None:
        """Forget how long sides were under pressure, because nobody was watching. The pause continues."""
        self._since.clear()

    def look(self, view: FleetView) -> Flip | None:
        """Return the change that is due now, if any."""
        now = self._clock()
        prefills, decodes = (_side(view, role) for role in (pb.ROLE_PREFILL, pb.ROLE_DECODE))
        for short, other in ((prefills, decodes), (decodes, prefills)):
            if not (short.units and short.high and other.can_spare):
                self._since.pop(short.role, None)
                continue
            if now < max(self._since.setdefault(short.role, now) + self._after_s, self._pause_until):
                continue
            self._since.clear()
            self._pause_until = now + PAUSE * self._after_s
            why = (
                f"the {role_of(short.role)} side was at {short.pressure():.1f} for {self._after_s:g} s, "
                f"the other one is at {other.pressure():.1f}"
            )
            return Flip(other.idlest[0], short.role, why)
        return None


def _side(view: FleetView, role: pb.Role) -> _Side:
    # A worker that cannot hand over KV cannot change sides.
    able = [
        unit
        for unit in view.units()
        if unit[0].placeable and all(one.role == role and one.capacity.compatibility_hash for one in unit)
    ]
    return _Side(role, able)


def _queued(workers: list[WorkerRecord]) -> float:
    budget = sum(one.capacity.max_num_batched_tokens for one in workers)
    return sum(one.reserved.prompt_tokens for one in workers) / max(1, budget)


def _used(workers: list[WorkerRecord]) -> float:
    heard = [one.load for one in workers if one.load is not None]
    requests = sum(load.running + load.waiting for load in heard)
    blocks = sum(
        usable_blocks(one.capacity) - one.load.free_blocks for one in workers if one.load is not None
    )
    return max(requests / max(1, sum(one.capacity.max_num_seqs for one in workers)), blocks / _cache(workers))


def _booked(workers: list[WorkerRecord]) -> float:
    return sum(one.reserved.blocks for one in workers) / _cache(workers)


def _cache(workers: list[WorkerRecord]) -> int:
    return max(1, sum(usable_blocks(one.capacity) for one in workers))
