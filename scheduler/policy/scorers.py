"""The built-in scorers.

A worker's load is the higher one of its bookings and its last heartbeat: bookings are up to date, and
heartbeats include requests that this scheduler has not learned of yet.
"""

from __future__ import annotations

from typing import ClassVar

from baton.scheduler.booking import blocks_for, max_requests, usable_blocks
from baton.scheduler.need import Need
from baton.scheduler.policy.base import Scorer, Side
from baton.scheduler.types import WorkerRecord

# The weight of a token to compute relative to a token queued before it. It is above 1 because computing what
# another worker has cached also delays later requests. With 1, chats that kept workers busy half of the time
# left their caches for any shorter queue, and their mean time to first token was 1.5 times as long (decision
# 41).
COMPUTED = 3.0

MEASURED_S = 5.0  # s of prefill before the measured speed is used
GUESSED_SPEED = 5_000.0  # prompt tokens per second


class QueuedPromptTokens(Scorer):
    """Prefer the shortest queue in prompt tokens, as in Splitwise (Patel et al., 2024), section IV."""

    side: ClassVar[Side] = Side.PREFILL

    def score(self, worker: WorkerRecord, need: Need) -> float:
        del need
        return _share_left(worker.reserved.prompt_tokens, self.limits.max_queued_prompt_tokens)


class PrefillWork(Scorer):
    """Prefer the least time for the queue and the uncached part of the prompt, at the measured speed.

    One second of work scores a half, so that scores also differ between short queues.
    """

    side: ClassVar[Side] = Side.PREFILL

    def score(self, worker: WorkerRecord, need: Need) -> float:
        tokens = worker.reserved.prompt_tokens + COMPUTED * need.tokens_for(worker.worker_id)
        return 1 / (1 + tokens / prompt_speed(worker))


class HeldTokens(Scorer):
    """Prefer the worker that holds most of the prompt: the least KV to transfer and to store."""

    side: ClassVar[Side] = Side.DECODE

    def score(self, worker: WorkerRecord, need: Need) -> float:
        return 1 - need.tokens_for(worker.worker_id) / need.prompt_tokens


class StagingRoom(Scorer):
    """Prefer the most room for saved KV. Without room, a prompt waits before it is prefilled."""

    side: ClassVar[Side] = Side.PREFILL

    def score(self, worker: WorkerRecord, need: Need) -> float:
        del need
        load = worker.load
        return _share_left(load.pinned_bytes, load.staging_bytes) if load and load.staging_bytes else 1.0


class RunningRequests(Scorer):
    """Prefer the fewest requests: a step takes longer in a larger batch."""

    side: ClassVar[Side] = Side.DECODE

    def score(self, worker: WorkerRecord, need: Need) -> float:
        del need
        seen = worker.load.running + worker.load.waiting if worker.load else 0
        requests = max(worker.reserved.requests, seen)
        return _share_left(requests, max_requests(worker.capacity, self.limits))


class FreeBlocks(Scorer):
    """Prefer the most free KV blocks after this request."""

    side: ClassVar[Side] = Side.DECODE

    def score(self, worker: WorkerRecord, need: Need) -> float:
        usable = usable_blocks(worker.capacity)
        seen = usable - worker.load.free_blocks if worker.load else 0
        return _share_left(max(worker.reserved.blocks, seen) + blocks_for(need, worker.capacity), usable)


def _share_left(used: int, limit: int) -> float:
    return min(1.0, max(0.0, 1 - used / max(1, limit)))


def prompt_speed(worker: WorkerRecord) -> float:
    """Return prompt tokens per second: measured, or a guess if the worker has hardly prefilled yet."""
    counts = worker.load.counts if worker.load else None
    if counts is None or counts.busy_s < MEASURED_S or not counts.computed_tokens:
        return GUESSED_SPEED
    return counts.computed_tokens / counts.busy_s
