"""The share of a worker that a request books, and whether there is room for it.

Three quantities are booked, each released as soon as it is free again:

- prompt tokens, on the worker that runs the prompt, until it is prefilled: the tokens not known to be in its
  prefix cache. The limit keeps the time to first token short. A worker with nothing queued takes a prompt
  above the limit too, or that prompt would never run.
- requests, on both workers. The decode worker's limit is a multiple of its batch.
- KV blocks, on the decode worker, until the request is over: the prompt, the look-ahead slots of speculation
  and the first `OUTPUT_TOKENS_BOOKED` output tokens (fewer if max_tokens is lower). The whole output is not
  booked: clients seldom set a limit, so most of the cache would lie idle. Requests that outgrow the cache are
  preempted by the engine and recomputed. Blocks shared with another running request, such as a common system
  prompt, are given back when decoding begins.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.protos import scheduler_pb2 as pb
from baton.scheduler.need import Need
from baton.scheduler.types import Booking, PlacementLimits, WorkerRecord

OUTPUT_TOKENS_BOOKED = 256  # tokens


@dataclass(frozen=True, slots=True)
class Source:
    """Name a worker that holds the first `tokens` of a prompt that its prefill worker lacks."""

    worker: WorkerRecord
    tokens: int


@dataclass(frozen=True, slots=True)
class Assignment:
    """Hold the workers chosen for an attempt, and its booking; `prefill` is None if `decode` does it all."""

    prefill: WorkerRecord | None
    decode: WorkerRecord
    booking: Booking
    held: int | None = None  # prompt tokens held by the worker that runs the prompt; None: unknown
    # Hold back the first token: the decode worker may not go on at once (`waits_for_slot`).
    waits: bool = False
    source: Source | None = None


def max_requests(capacity: pb.Capacity, limits: PlacementLimits, room: float = 1.0) -> int:
    """Return how many requests a decode worker may hold, running and waiting; at least 1.

    room: the share of the limits that a request may fill (`Need.room`). Below 1 it applies to the slots
    alone, as such requests do not queue here.
    """
    most = capacity.max_num_seqs * (limits.max_queue_factor if room >= 1 else room)
    return max(1, int(most))


def usable_blocks(capacity: pb.Capacity) -> int:
    """Return the KV blocks available to requests: vLLM keeps block 0 for padding."""
    return max(0, capacity.num_blocks - 1)


def max_blocks(need: Need, capacity: pb.Capacity) -> int:
    """Return how many KV blocks may be booked, including `need`; an idle worker takes any request."""
    return max(int(need.room * usable_blocks(capacity)), blocks_for(need, capacity))


def max_prompt_tokens(need: Need, limits: PlacementLimits) -> int:
    """Return how many prompt tokens may be queued, including those of `need`."""
    return int(need.room * limits.max_queued_prompt_tokens)


def blocks_for(need: Need, capacity: pb.Capacity) -> int:
    """Return the KV blocks to book for `need` on a decode worker, capped at its total."""
    growth = min(need.max_new_tokens, capacity.max_model_len - need.prompt_tokens, OUTPUT_TOKENS_BOOKED)
    tokens = need.prompt_tokens + capacity.lookahead_tokens + max(0, growth)
    return min(_blocks(tokens, capacity), usable_blocks(capacity))


def could_prefill(need: Need, worker: WorkerRecord) -> bool:
    """Return whether the prompt fits into the idle worker. The engine needs room for one output token."""
    capacity = worker.capacity
    short_enough = need.prompt_tokens < capacity.max_model_len
    return short_enough and _blocks(need.prompt_tokens, capacity) <= usable_blocks(capacity)


def could_decode(need: Need, worker: WorkerRecord) -> bool:
    """Return whether the prompt and the look-ahead slots fit into the idle worker."""
    capacity = worker.capacity
    slots = need.prompt_tokens + capacity.lookahead_tokens
    return need.prompt_tokens < capacity.max_model_len and _blocks(slots, capacity) <= usable_blocks(capacity)


def may_prefill(need: Need, worker: WorkerRecord, limits: PlacementLimits) -> bool:
    """Return whether there is room for the prompt now."""
    queued = worker.reserved.prompt_tokens
    return queued == 0 or queued + need.tokens_for(worker.worker_id) <= max_prompt_tokens(need, limits)


def may_decode(need: Need, worker: WorkerRecord, limits: PlacementLimits) -> bool:
    """Return whether there is room to decode the request now."""
    capacity, reserved = worker.capacity, worker.reserved
    if reserved.requests >= max_requests(capacity, limits, need.room):
        return False
    blocks = blocks_for(need, capacity)
    return reserved.blocks + blocks <= max(blocks, int(need.room * usable_blocks(capacity)))


def may_help(need: Need, worker: WorkerRecord, queued: int, limits: PlacementLimits) -> bool:
    """Return whether a decode worker may run this prompt in place of a prefill worker with `queued` tokens.

    The decode worker must be decoding nothing by its bookings, or have run nothing at its last heartbeat
    (anything booked since then is a prompt of the same burst). Bookings alone would end the help with the
    burst's first handoff; heartbeats alone would miss a burst that comes within half a second of another
    request.

    Requests handed to the worker meanwhile share its steps until its own prompts are prefilled: hence the
    limit. For the same reason it does not help requests of a lower class: a higher one that arrives a moment
    later would have to share those steps.
    """
    if need.room < 1:
        return False
    load, own = worker.load, worker.reserved.prompt_tokens
    idle = load is not None and not (worker.reserved.decoding and (load.running or load.waiting))
    return idle and own < queued and own + need.tokens_for(worker.worker_id) <= limits.idle_decode_tokens


def prefill_bound(need: Need, worker: WorkerRecord, limits: PlacementLimits) -> str:
    """Describe, for people, what keeps a prompt out: how full the worker is, and the key that bounds it."""
    queued = worker.reserved.prompt_tokens
    return f"{queued} of {max_prompt_tokens(need, limits)} prompt tokens: scheduler.max_queued_prompt_tokens"


def decode_bound(need: Need, worker: WorkerRecord, limits: PlacementLimits) -> str:
    """Describe, for people, what keeps a request from being decoded here."""
    reserved, capacity = worker.reserved, worker.capacity
    most = max_requests(capacity, limits, need.room)
    if reserved.requests >= most:
        return f"{reserved.requests} of {most} requests: engine.max_num_seqs, scheduler.max_queue_factor"
    blocks = f"{reserved.blocks} of {max_blocks(need, capacity)} KV blocks"
    return f"{blocks}, {blocks_for(need, capacity)} more are needed: engine.kv_cache_gib"


def waits_for_slot(worker: WorkerRecord) -> bool:
    """Return whether another request may have to wait: all slots are booked, or it runs prompts itself."""
    reserved = worker.reserved
    return reserved.requests >= worker.capacity.max_num_seqs or reserved.prompt_tokens > 0


def booking_of(
    need: Need, prefill: WorkerRecord | None, decode: WorkerRecord, source: Source | None = None
) -> Booking:
    """Return what to book for `need` on these workers, less what the prefill worker pulls from `source`."""
    computed = (
        need.prompt_tokens - source.tokens if source else need.tokens_for((prefill or decode).worker_id)
    )
    return Booking(
        attempt=need.attempt,
        router_id=need.router_id,
        prefill_id=prefill.worker_id if prefill else "",
        decode_id=decode.worker_id,
        prompt_tokens=computed,
        blocks=blocks_for(need, decode.capacity),
    )


def _blocks(tokens: int, capacity: pb.Capacity) -> int:
    return -(-tokens // max(1, capacity.block_size))
