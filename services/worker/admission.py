"""Enforce a worker's limits: accept a request, or refuse it at once.

Within milliseconds, routers and schedulers may give away the same room, so the worker keeps its own count,
in the units of a booking (scheduler/booking.py): a request from its Start to its end, and its prompt until
the first output. A booked request always fits, unless the abort of another is still on its way. Requests
without a booking (a SAVE, a request that runs alone) are limited in number only. Used on the event loop's
thread; costs 1.2 us per request.
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
    """The room that one attempt holds. It shrinks as the attempt proceeds and is zero at its end."""

    prompt_tokens: int = 0  # not prefilled yet
    requests: int = 0
    blocks: int = 0
    extras: int = 0  # requests without a booking


class Admission:
    """The room that one worker's requests hold.

    Invariants: each figure is the sum over all shares that have not been given back, so it is never below
    zero. It exceeds its limit only if a single request does.
    """

    def __init__(self, limits: PlacementLimits) -> None:
        self._limits = limits
        self.prompt_tokens = self.requests = self.blocks = self.extras = 0
        self._max_requests = self._max_blocks = self._max_extras = 0

    def fit(self, capacity: pb.Capacity) -> None:
        self._max_requests = max_requests(capacity, self._limits)
        self._max_blocks = usable_blocks(capacity)
        self._max_extras = max(1, capacity.max_num_seqs)

    def take(self, start: Start) -> Share:
        """Count a request and return its share. Raises RequestRefused(FULL) with the limit reached."""
        if start.phase == PHASE_SAVE or start.alone_tokens:
            share, problem = Share(extras=1), ""
            if self.extras >= self._max_extras:
                problem = f"{self.extras} of {self._max_extras} saves and trials: engine.max_num_seqs"
        elif start.phase == PHASE_PREFILL:
            share = Share(prompt_tokens=max(1, start.prompt_tokens), requests=1)
            problem = self._prompt_problem(share)
        else:
            # An idle worker accepts a request of any size; its share is capped, so that others still fit.
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
            return f"{bound}: engine.max_num_seqs"
        if self.blocks + share.blocks <= self._max_blocks:
            return ""
        bound = f"{self.blocks} of {self._max_blocks} KV blocks"
        return f"{bound}, {share.blocks} more are needed: engine.kv_cache_gib"
