"""Keep a worker's own bounds: it takes a request, or refuses it at once.

A scheduler advises by what it has heard, and a router without one by its last snapshot, so two of them may
give away the same room within a few milliseconds. The worker itself therefore counts what has arrived, in the
same units as a booking (scheduler/booking.py).

A request counts here from its Start to its end, and its prompt until its first output. Whoever booked it
counts it for longer: from before the Start was sent until the router has heard of the end. So a booked
request finds room here too, except while the abort of another is still on its way. Classes that leave room to
others do so at placement.

Requests that nobody books (a SAVE, a request that is tried alone) are bounded in number only. Plain state;
loop's thread only. A request costs 1.2 us from its Start to its end, a refusal 1.7.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.protos import scheduler_pb2 as pb
from baton.protos.worker_pb2 import PHASE_PREFILL, PHASE_SAVE, Failed, Start
from baton.scheduler.booking import max_requests, usable_blocks
from baton.scheduler.types import PlacementLimits
from baton.services.engine.errors import RequestRefused


@dataclass(slots=True)
class Share:
    """The room that one attempt holds. It falls as the attempt goes on and is zero at its end."""

    prompt_tokens: int = 0  # not prefilled yet
    requests: int = 0
    blocks: int = 0
    extras: int = 0  # requests that nobody booked


class Admission:
    """The sum of one worker's requests.

    Invariants: each figure is the sum over the shares taken and not given back, so never below zero. It
    exceeds its bound only for a share that came when nothing else was counted.
    """

    def __init__(self, limits: PlacementLimits) -> None:
        """Begin without room."""
        self._limits = limits
        self.prompt_tokens = self.requests = self.blocks = self.extras = 0
        self._max_requests = self._max_blocks = self._max_extras = 0

    def fit(self, capacity: pb.Capacity) -> None:
        """Adopt the capacity of an engine."""
        self._max_requests = max_requests(capacity, self._limits)
        self._max_blocks = usable_blocks(capacity)
        self._max_extras = max(1, capacity.max_num_seqs)

    def take(self, start: Start) -> Share:
        """Count a request and return its share. Raises RequestRefused(FULL), which says how full it is."""
        if start.phase == PHASE_SAVE or start.alone_tokens:
            share, problem = Share(extras=1), self._extras_problem()
        elif start.phase == PHASE_PREFILL:
            share = Share(prompt_tokens=max(1, start.prompt_tokens), requests=1)
            problem = self._prompt_problem(share)
        else:
            # Cap at the worker's total, or a request that an idle worker takes would shut out all others.
            blocks = min(start.blocks, self._max_blocks)
            share = Share(start.prompt_tokens, 1, blocks)
            problem = self._prompt_problem(share) or self._decode_problem(share)
        if problem:
            raise RequestRefused(Failed.CODE_FULL, f"this worker is full: {problem}")
        self.prompt_tokens += share.prompt_tokens
        self.requests += share.requests
        self.blocks += share.blocks
        self.extras += share.extras
        return share

    def prefilled(self, share: Share) -> None:
        """Give back the room of a prompt. Idempotent."""
        self.prompt_tokens -= share.prompt_tokens
        share.prompt_tokens = 0

    def shared(self, share: Share, blocks: int) -> None:
        """Give back KV blocks that other requests hold too."""
        less = min(blocks, share.blocks)
        self.blocks -= less
        share.blocks -= less

    def give_back(self, share: Share) -> None:
        """Give back the rest of a share. Idempotent."""
        self.prompt_tokens -= share.prompt_tokens
        self.requests -= share.requests
        self.blocks -= share.blocks
        self.extras -= share.extras
        share.prompt_tokens = share.requests = share.blocks = share.extras = 0

    def _prompt_problem(self, share: Share) -> str:
        queued, most = self.prompt_tokens, self._limits.max_queued_prompt_tokens
        more = share.prompt_tokens
        if not more or not queued or queued + more <= most:
            return ""
        return f"{queued} of {most} prompt tokens, {more} more are needed: scheduler.max_queued_prompt_tokens"

    def _decode_problem(self, share: Share) -> str:
        if self.requests >= self._max_requests:
            bound = f"{self.requests} of {self._max_requests} requests"
            return f"{bound}: engine.max_num_seqs, scheduler.max_queue_factor"
        if self.blocks + share.blocks <= self._max_blocks:
            return ""
        bound = f"{self.blocks} of {self._max_blocks} KV blocks"
        return f"{bound}, {share.blocks} more are needed: engine.kv_cache_gib"

    def _extras_problem(self) -> str:
        if self.extras < self._max_extras:
            return ""
        return f"{self.extras} of {self._max_extras} saves and trials: engine.max_num_seqs"
