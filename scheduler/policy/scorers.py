"""The built-in scorers.

The scheduler's bookings and the worker's heartbeat are two views of one load: bookings count at once,
heartbeats are late but know what this scheduler has not been told of. The higher one counts.
"""

from __future__ import annotations

from typing import ClassVar

from baton.scheduler.booking import blocks_for, max_requests, usable_blocks
from baton.scheduler.need import Need
from baton.scheduler.policy.base import Scorer, Side
from baton.scheduler.policy.speed import prompt_speed
from baton.scheduler.types import WorkerRecord

# A token that is computed counts so many times as one that is queued before it. What a worker computes that
# another one holds delays those behind it, too: with 1, chats that kept workers busy for half of the time
# left their caches for any shorter queue; their mean time to first token was by half longer (decision 41).
COMPUTED = 3.0


class QueuedPromptTokens(Scorer):
    """Prefers the fewest prompt tokens ahead of this one: join the shortest queue, measured in tokens.

    After Splitwise (Patel et al., 2024), section IV.
    """

    side: ClassVar[Side] = Side.PREFILL

    def score(self, worker: WorkerRecord, need: Need) -> float:
        del need
        return _share_left(worker.reserved.prompt_tokens, self.limits.max_queued_prompt_tokens)


class PrefillWork(Scorer):
    """Prefers the least time until the prompt is prefilled: what is queued, and what is not cached of it.

    In seconds, by the speed at which this worker has computed prompts so far: one second of work is a score
    of a half, so that short queues are told apart as well as long ones. What the prompt adds itself counts
    `COMPUTED` times: it stays where it is held while the queue there takes no more than so much longer.
    """

    side: ClassVar[Side] = Side.PREFILL

    def score(self, worker: WorkerRecord, need: Need) -> float:
        tokens = worker.reserved.prompt_tokens + COMPUTED * need.tokens_for(worker.worker_id)
        return 1 / (1 + tokens / prompt_speed(worker))


class HeldTokens(Scorer):
    """Prefers the worker that holds most of the prompt: that much KV need not come, nor find room."""

    side: ClassVar[Side] = Side.DECODE

    def score(self, worker: WorkerRecord, need: Need) -> float:
        return 1 - need.tokens_for(worker.worker_id) / need.prompt_tokens


class StagingRoom(Scorer):
    """Prefers the most room for saved KV: where little is left, a prompt waits before it is prefilled."""

    side: ClassVar[Side] = Side.PREFILL

    def score(self, worker: WorkerRecord, need: Need) -> float:
        del need
        load = worker.load
        return _share_left(load.pinned_bytes, load.staging_bytes) if load and load.staging_bytes else 1.0


class RunningRequests(Scorer):
    """Prefers the fewest requests in the batch and before it: a step's time grows with the batch."""

    side: ClassVar[Side] = Side.DECODE

    def score(self, worker: WorkerRecord, need: Need) -> float:
        del need
        seen = worker.load.running + worker.load.waiting if worker.load else 0
        requests = max(worker.reserved.requests, seen)
        return _share_left(requests, max_requests(worker.capacity, self.limits))


class FreeBlocks(Scorer):
    """Prefers the most KV blocks left once this request, with its look-ahead slots, is in."""

    side: ClassVar[Side] = Side.DECODE

    def score(self, worker: WorkerRecord, need: Need) -> float:
        usable = usable_blocks(worker.capacity)
        seen = usable - worker.load.free_blocks if worker.load else 0
        return _share_left(max(worker.reserved.blocks, seen) + blocks_for(need, worker.capacity), usable)


def _share_left(used: int, limit: int) -> float:
    return min(1.0, max(0.0, 1 - used / max(1, limit)))
