"""Bookings of requests on workers, and whether there is room for them.

- Prompt tokens not known to be cached are booked on the worker that runs the prompt until they are prefilled.
  The limit keeps the time to first token short. A worker with an empty queue also takes a longer prompt.
- Requests are booked on both workers. The decode worker's limit is a multiple of its batch size.
- KV blocks are booked on the decode worker: the prompt, the look-ahead slots of speculation and the first
  `OUTPUT_TOKENS_BOOKED` output tokens, as clients seldom set a limit. The engine preempts requests that
  outgrow the cache. Blocks shared with another running request are released when decoding begins.

An encode books an image's tokens and a request on an encode worker, which has no KV blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.protos import scheduler_pb2 as pb
from baton.scheduler.need import Need
from baton.scheduler.types import Booking, PlacementLimits, WorkerRecord, worker_to_wire

OUTPUT_TOKENS_BOOKED = 256  # tokens


@dataclass(frozen=True, slots=True)
class Source:
    """A worker from which the prefill worker should pull the first `tokens` of a prompt."""

    worker: WorkerRecord
    tokens: int


@dataclass(frozen=True, slots=True)
class Assignment:
    prefill: WorkerRecord | None  # None: the decode worker also prefills
    decode: WorkerRecord
    booking: Booking
    held: int | None = None  # prompt tokens that the worker running the prompt has cached; None: unknown
    waits: bool = False  # hold back the first token: the decode worker may not start at once
    source: Source | None = None


def max_requests(capacity: pb.Capacity, limits: PlacementLimits, room: float = 1.0) -> int:
    """Return how many requests a decode worker may hold, running and waiting; at least 1.

    room: see `Need.room`. If it is below 1, requests do not queue here: their limit is a share of the batch.
    """
    most = capacity.max_num_seqs * (limits.max_queue_factor if room >= 1 else room)
    return max(1, int(most))


def usable_blocks(capacity: pb.Capacity) -> int:
    """Return the number of KV blocks for requests: vLLM keeps block 0 for padding."""
    return max(0, capacity.num_blocks - 1)


def max_blocks(need: Need, capacity: pb.Capacity) -> int:
    """Return how many KV blocks may be booked, including `need`; an idle worker takes any request."""
    return max(int(need.room * usable_blocks(capacity)), blocks_for(need, capacity))


def max_prompt_tokens(need: Need, limits: PlacementLimits) -> int:
    """Return how many prompt tokens may be queued, including those of `need`."""
    return int(need.room * limits.max_queued_prompt_tokens)


def blocks_for(need: Need, capacity: pb.Capacity) -> int:
    """Return the number of KV blocks to book on a decode worker, at most as many as it has."""
    if need.encode:
        return 0
    growth = min(need.max_new_tokens, capacity.max_model_len - need.prompt_tokens, OUTPUT_TOKENS_BOOKED)
    tokens = need.prompt_tokens + capacity.lookahead_tokens + max(0, growth)
    return min(_blocks(tokens, capacity), usable_blocks(capacity))


def could_prefill(need: Need, worker: WorkerRecord) -> bool:
    """Return whether an idle worker has room for the prompt and one output token, or for the image."""
    capacity = worker.capacity
    if need.encode:
        return need.prompt_tokens <= capacity.max_model_len
    short_enough = need.prompt_tokens < capacity.max_model_len
    return short_enough and _blocks(need.prompt_tokens, capacity) <= usable_blocks(capacity)


def could_decode(need: Need, worker: WorkerRecord) -> bool:
    """Return whether an idle worker has room for the prompt and the look-ahead slots."""
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

    The worker must be idle: no decoding request is booked on it, or it ran nothing at its last heartbeat.
    Going by bookings alone, help would end with the burst's first handoff; going by heartbeats alone, it
    would miss a burst that follows another request within half a second.

    Until these prompts are prefilled, decoding requests share their engine steps, hence the limit. Requests
    of a lower class get no help, because a request of a higher class may arrive and share those steps.
    """
    if need.room < 1:
        return False
    load, own = worker.load, worker.reserved.prompt_tokens
    idle = load is not None and not (worker.reserved.decoding and (load.running or load.waiting))
    return idle and own < queued and own + need.tokens_for(worker.worker_id) <= limits.idle_decode_tokens


def prefill_bound(need: Need, worker: WorkerRecord, limits: PlacementLimits) -> str:
    """Describe why a prompt was refused: how full the worker is, and the key that sets the limit."""
    queued = worker.reserved.prompt_tokens
    return f"{queued} of {max_prompt_tokens(need, limits)} prompt tokens: scheduler.max_queued_prompt_tokens"


def decode_bound(need: Need, worker: WorkerRecord, limits: PlacementLimits) -> str:
    reserved, capacity = worker.reserved, worker.capacity
    most = max_requests(capacity, limits, need.room)
    if reserved.requests >= most:
        return f"{reserved.requests} of {most} requests: engine.max_num_seqs"
    blocks = f"{reserved.blocks} of {max_blocks(need, capacity)} KV blocks"
    return f"{blocks}, {blocks_for(need, capacity)} more are needed: engine.kv_cache_gib"


def waits_for_slot(worker: WorkerRecord) -> bool:
    """Return whether a request may have to wait: all slots are booked, or the worker runs prompts itself."""
    reserved = worker.reserved
    return reserved.requests >= worker.capacity.max_num_seqs or reserved.prompt_tokens > 0


def booking_of(
    need: Need, prefill: WorkerRecord | None, decode: WorkerRecord, source: Source | None = None
) -> Booking:
    """Return the booking for `need`, without the prompt tokens that are pulled from `source`."""
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


def placement_to_wire(assigned: Assignment, lease_s: float) -> pb.Placement:
    booking, source = assigned.booking, assigned.source
    return pb.Placement(
        request_id=booking.attempt.request_id,
        epoch=booking.attempt.epoch,
        prefill=worker_to_wire(assigned.prefill) if assigned.prefill else None,
        decode=worker_to_wire(assigned.decode),
        lease_s=lease_s,
        blocks=booking.blocks,
        waits=assigned.waits,
        prompt_tokens=booking.prompt_tokens,
        source=worker_to_wire(source.worker) if source else None,
        source_tokens=source.tokens if source else 0,
    )


def _blocks(tokens: int, capacity: pb.Capacity) -> int:
    return -(-tokens // max(1, capacity.block_size))
