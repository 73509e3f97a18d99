"""Changes of role, where one side is short of workers for long while the other has one to spare.

A side's pressure is what waits for it, in what it does at once: for prefill workers queued prompt tokens in
the token budget of a step; for decode workers the requests that they have in the size of a batch, or the
blocks in use where that is more. What is only booked on a decode worker does not count: its prompt may wait
for a prefill worker, which is the other side's pressure. A worker changes sides when the pressure on one side
was high for `after_s` without a break, and the other side, with one worker less, would still be at ease and
hold what is booked on it. The gap between high and ease is the hysteresis: a change cannot at once be the
reason for the opposite one. Then nobody changes for `PAUSE` times as long, in the whole deployment.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from baton.protos import scheduler_pb2 as pb
from baton.scheduler.booking import usable_blocks
from baton.scheduler.types import FleetView, WorkerRecord

HIGH_PREFILL = 2.0  # steps' worth of queued prompts on every prefill worker
HIGH_DECODE = 0.9  # of the batches, or of the KV caches
EASE_PREFILL = 0.5
EASE_DECODE = 0.6
PAUSE = 3.0  # times `after_s`


@dataclass(frozen=True, slots=True)
class Flip:
    """A change that is due: `worker` should take `role`, because of `why`."""

    worker: WorkerRecord
    role: pb.Role
    why: str


@dataclass(frozen=True, slots=True)
class _Side:
    role: pb.Role
    workers: list[WorkerRecord]

    def pressure(self, fewer: int = 0) -> float:
        """Return the pressure on its workers, or on what is left of them with so many `fewer`."""
        share = len(self.workers) / (len(self.workers) - fewer)
        return share * (_queued(self.workers) if self.role == pb.ROLE_PREFILL else _used(self.workers))

    @property
    def high(self) -> bool:
        return self.pressure() >= (HIGH_PREFILL if self.role == pb.ROLE_PREFILL else HIGH_DECODE)

    @property
    def can_spare(self) -> bool:
        ease = EASE_PREFILL if self.role == pb.ROLE_PREFILL else EASE_DECODE
        others = len(self.workers) - 1
        return (
            others > 0 and self.pressure(fewer=1) <= ease and _booked(self.workers) <= others / (others + 1)
        )


class Balance:
    """Watches the sides' pressure from one view to the next. Plain state."""

    def __init__(self, after_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._after_s = after_s
        self._clock = clock
        self._since: dict[pb.Role, float] = {}  # role that is short of workers -> since when

    @property
    def pause_s(self) -> float:
        """Least seconds from one change to the next."""
        return PAUSE * self._after_s

    def look(self, view: FleetView) -> Flip | None:
        """Return the worker that should change, if it is time. Called about twice a second."""
        prefills, decodes = (_side(view, role) for role in (pb.ROLE_PREFILL, pb.ROLE_DECODE))
        for short, other in ((prefills, decodes), (decodes, prefills)):
            if not (short.workers and short.high and other.can_spare):
                self._since.pop(short.role, None)
                continue
            if self._clock() - self._since.setdefault(short.role, self._clock()) < self._after_s:
                continue
            del self._since[short.role]
            idlest = min(other.workers, key=lambda one: (one.reserved.requests, one.reserved.prompt_tokens))
            name = pb.Role.Name(short.role).removeprefix("ROLE_").lower()
            why = (
                f"the {name} side was at {short.pressure():.1f} for {self._after_s:g} s, "
                f"the other one is at {other.pressure():.1f}"
            )
            return Flip(idlest, short.role, why)
        return None


def _side(view: FleetView, role: pb.Role) -> _Side:
    # A worker that hands nothing over cannot change sides.
    able = [one for one in view.workers.values() if one.placeable and one.capacity.compatibility_hash]
    return _Side(role, [one for one in able if one.role == role])


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
