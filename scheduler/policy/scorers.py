"""The built-in scorers.

The scheduler's bookings and the worker's heartbeat are two views of one load: bookings count at once,
heartbeats are late but include what this scheduler has not been told. The higher one counts.
"""

from __future__ import annotations

from typing import ClassVar

from baton.scheduler.booking import blocks_for, max_requests, usable_blocks
from baton.scheduler.need import Need
from baton.scheduler.policy.base import Scorer, Side
from baton.scheduler.policy.speed import prompt_speed
from baton.scheduler.types import WorkerRecord

# The weight of a token to compute relative to a token queued before it: recomputing what another worker holds
# delays the requests behind it, too. With 1, chats that kept workers busy half of the time left their caches
# for any shorter queue, and their mean time to first token was 1.5 times as long (decision 41).
COMPUTED = 3.0


class QueuedPromptTokens(Scorer):
    """Prefer the fewest prompt tokens ahead of this one: join the shortest queue, measured in tokens.

    Follows Splitwise (Patel et al., 2024), section IV.
    """

    side: ClassVar[Side] = Side.PREFILL

    def score(self, worker: WorkerRecord, need: Need) -> float:
        del need
        return _share_left(worker.reserved.prompt_tokens, self.limits.max_queued_prompt_tokens)


class PrefillWork(Scorer):
    """Prefer the least time until the prompt is prefilled: the queue, and the uncached part of the prompt.

    Time is estimated from this worker's measured prompt speed; one second of work scores a half, so that
    short queues are told apart as well as long ones. The prompt's own tokens count `COMPUTED` times: it stays
    where its prefix is held as long as the queue there costs less than that.
    """

    side: ClassVar[Side] = Side.PREFILL

    def score(self, worker: WorkerRecord, need: Need) -> float:
        tokens = worker.reserved.prompt_tokens + COMPUTED * need.tokens_for(worker.worker_id)
        return 1 / (1 + tokens / prompt_speed(worker))


class HeldTokens(Scorer):
    """Prefer the worker that holds most of the prompt: less KV to transfer and to find room for."""

    side: ClassVar[Side] = Side.DECODE

    def score(self, worker: WorkerRecord, need: Need) -> float:
        return 1 - need.tokens_for(worker.worker_id) / need.prompt_tokens


class StagingRoom(Scorer):
    """Prefer the most room for saved KV: with little left, a prompt waits before it is prefilled."""

    side: ClassVar[Side] = Side.PREFILL

    def score(self, worker: WorkerRecord, need: Need) -> float:
        del need
        load = worker.load
        return _share_left(load.pinned_bytes, load.staging_bytes) if load and load.staging_bytes else 1.0


class RunningRequests(Scorer):
    """Prefer the fewest requests running or queued: a step's time grows with the batch."""

    side: ClassVar[Side] = Side.DECODE

    def score(self, worker: WorkerRecord, need: Need) -> float:
        del need
        seen = worker.load.running + worker.load.waiting if worker.load else 0
        requests = max(worker.reserved.requests, seen)
        return _share_left(requests, max_requests(worker.capacity, self.limits))


class FreeBlocks(Scorer):
    """Prefer the most KV blocks left once this request, with its look-ahead slots, is in."""

    side: ClassVar[Side] = Side.DECODE

    def score(self, worker: WorkerRecord, need: Need) -> float:
        usable = usable_blocks(worker.capacity)
        seen = usable - worker.load.free_blocks if worker.load else 0
        return _share_left(max(worker.reserved.blocks, seen) + blocks_for(need, worker.capacity), usable)


def _share_left(used: int, limit: int) -> float:
    return min(1.0, max(0.0, 1 - used / max(1, limit)))
