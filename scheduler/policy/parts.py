"""The built-in filters, scorers and pickers.

A worker's load is the higher of its bookings and its last heartbeat: bookings are up to date, and
heartbeats include requests that this scheduler has not learned of yet.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import ClassVar

from baton.facts import unlike
from baton.protos import scheduler_pb2 as pb
from baton.scheduler.booking import (
    blocks_for,
    could_decode,
    could_prefill,
    decode_bound,
    max_requests,
    may_decode,
    may_prefill,
    prefill_bound,
    usable_blocks,
)
from baton.scheduler.need import Need
from baton.scheduler.policy.base import Filter, PairFilter, Picker, Scorer, Side
from baton.scheduler.types import WorkerRecord


class Placeable(Filter):
    """Require that the worker is ready and not drained."""

    code: ClassVar[pb.Rejection.Code] = pb.Rejection.CODE_NO_WORKERS
    reason: ClassVar[str] = "none is ready"

    def keeps(self, worker: WorkerRecord, _: Need, __: Side) -> bool:
        return worker.placeable


class NotExcluded(Filter):
    """Require that the worker has not failed an earlier attempt at this request."""

    code: ClassVar[pb.Rejection.Code] = pb.Rejection.CODE_NO_WORKERS
    reason: ClassVar[str] = "all that are ready failed an earlier attempt"

    def keeps(self, worker: WorkerRecord, need: Need, _: Side) -> bool:
        return worker.worker_id not in need.exclude


class Fits(Filter):
    """Require that the worker could run the request if it were idle."""

    code: ClassVar[pb.Rejection.Code] = pb.Rejection.CODE_TOO_LARGE
    reason: ClassVar[str] = "the prompt is longer than the model's limit or the KV cache"

    def keeps(self, worker: WorkerRecord, need: Need, side: Side) -> bool:
        prefills = not side.prefills or could_prefill(need, worker)
        return prefills and (not side.decodes or could_decode(need, worker))


class HasRoom(Filter):
    """Require that the worker has room now. A rejection names the limit and its key."""

    code: ClassVar[pb.Rejection.Code] = pb.Rejection.CODE_FULL
    reason: ClassVar[str] = "all are full"

    def keeps(self, worker: WorkerRecord, need: Need, side: Side) -> bool:
        prefills = not side.prefills or may_prefill(need, worker, self.limits)
        return prefills and (not side.decodes or may_decode(need, worker, self.limits))

    def why(self, workers: Sequence[WorkerRecord], need: Need, side: Side) -> str:
        first = workers[0]
        if side.prefills and not may_prefill(need, first, self.limits):
            bound = prefill_bound(need, first, self.limits)
        else:
            bound = decode_bound(need, first, self.limits)
        return f"{self.reason} ({first.worker_id}: {bound})"


class SameRevision(Filter):
    """Require the router's version of vLLM, and the weights that generated the first tokens."""

    code: ClassVar[pb.Rejection.Code] = pb.Rejection.CODE_NO_WORKERS
    reason: ClassVar[str] = (
        "all that are ready run a different vLLM than the router, or not the weights that began the output"
    )

    def keeps(self, worker: WorkerRecord, need: Need, _: Side) -> bool:
        one = worker.identity
        return need.vllm_version in ("", one.vllm_version) and need.model_fingerprint in (
            "",
            one.model_fingerprint,
        )


class HasAdapter(Filter):
    """Require the request's adapter, with the same files as at the router."""

    code: ClassVar[pb.Rejection.Code] = pb.Rejection.CODE_NO_WORKERS
    reason: ClassVar[str] = "all that are ready lack the adapter"

    def keeps(self, worker: WorkerRecord, need: Need, _: Side) -> bool:
        wanted = need.adapter
        return wanted is None or worker.capacity.adapters.get(wanted.name) == wanted.fingerprint

    def why(self, workers: Sequence[WorkerRecord], need: Need, _: Side) -> str:
        name = need.adapter.name if need.adapter else ""
        others = [one.worker_id for one in workers if name in one.capacity.adapters]
        if others:
            return f"{others[0]} has other files than the router under the adapter's name {name!r}"
        return f"{workers[0].worker_id} does not have the adapter {name!r} (engine.lora)"


class Compatible(PairFilter):
    """Require equal weights, compatible KV and a common transport. Ranks may differ."""

    def keeps(self, prefill: WorkerRecord, decode: WorkerRecord) -> bool:
        ours, theirs = prefill.capacity, decode.capacity
        if prefill.identity.model_fingerprint != decode.identity.model_fingerprint:
            return False
        if ours.compatibility_hash != theirs.compatibility_hash:
            return False
        return any(one in theirs.transports for one in ours.transports)

    def explain(self, prefill: WorkerRecord, decode: WorkerRecord) -> str:
        ours, theirs = prefill.capacity, decode.capacity
        names = f"prefill worker {prefill.worker_id} and decode worker {decode.worker_id}"
        one, other = prefill.identity.model_fingerprint, decode.identity.model_fingerprint
        if one != other:
            revisions = f"{one[:12]}, {other[:12]}"
            return f"{names} have different weights ({revisions}): start workers of both roles with each"
        prefills, decodes = ((one.compatibility_hash, one.facts) for one in (ours, theirs))
        if why := unlike(prefills, decodes, ("on prefill", "on decode")):
            return f"{names} store KV differently ({why}): start them with the same engine settings"
        offered = f"{', '.join(ours.transports) or 'none'}; {', '.join(theirs.transports) or 'none'}"
        return f"{names} share no transport ({offered}): give them a common one"


# The weight of a token to compute relative to a token queued before it. It is above 1 because computing what
# another worker has cached also delays later requests. With 1, chats that kept workers busy half of the time
# left their caches for any shorter queue, and their mean time to first token was 1.5 times as long.
COMPUTED = 3.0

MEASURED_S = 5.0  # time of prefill before the measured speed is used
GUESSED_SPEED = 5_000.0  # prompt tokens per second


class QueuedPromptTokens(Scorer):
    """Prefer the shortest queue in prompt tokens, as in Splitwise (Patel et al., 2024), section IV."""

    side: ClassVar[Side] = Side.PREFILL

    def score(self, worker: WorkerRecord, _: Need) -> float:
        return _share_left(worker.reserved.prompt_tokens, self.limits.max_queued_prompt_tokens)


class PrefillWork(Scorer):
    """Prefer the least time for the queue and the uncached part of the prompt, at the measured speed.

    One second of work scores 0.5, so the scores of short queues differ, too.
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

    def score(self, worker: WorkerRecord, _: Need) -> float:
        load = worker.load
        return _share_left(load.pinned_bytes, load.staging_bytes) if load and load.staging_bytes else 1.0


class RunningRequests(Scorer):
    """Prefer the fewest requests: a step takes longer in a larger batch."""

    side: ClassVar[Side] = Side.DECODE

    def score(self, worker: WorkerRecord, _: Need) -> float:
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


class Best(Picker):
    """Pick the best of all workers, breaking ties at random. Suits one scheduler with few workers."""

    def pick(self, scored: Sequence[tuple[WorkerRecord, float]], rng: random.Random) -> WorkerRecord:
        top = max(score for _, score in scored)
        return rng.choice([worker for worker, score in scored if score == top])


class PowerOfTwo(Best):
    """Pick the best of two random workers and those that hold most of the prompt.

    Schedulers that do not know each other's last choices yet would otherwise all pick the same worker
    (Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing", 2001).
    """

    draws: ClassVar[int] = 2


class PowerOfFour(PowerOfTwo):
    """Pick the best of four random workers and those that hold most of the prompt.

    Uncached prompts find a shorter queue than with two, at the cost of scoring two more workers.
    """

    draws: ClassVar[int] = 4
