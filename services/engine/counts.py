"""Counts of an engine's work, in one step or since it began; the heartbeat carries the latter."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.protos import scheduler_pb2
from baton.services.decode.acceptance import DraftCounts


@dataclass(slots=True)
class Counts:
    """Prompt tokens, looked up and computed, drafts, outputs and time.

    Tokens looked up are counted when their request is admitted, as vLLM counts.
    """

    prefix_queries: int = 0  # looked up in the prefix cache
    prefix_hits: int = 0
    external_queries: int = 0  # asked of the handoff, beyond those hits
    external_hits: int = 0
    drafts: DraftCounts = field(default_factory=DraftCounts)  # verified
    computed_tokens: int = 0  # of prompts: found in no cache, and not handed over
    output_tokens: int = 0
    busy_s: float = 0.0  # in steps
    request_s: float = 0.0  # the same, each step times the requests that got tokens in it

    def add(self, other: Counts) -> None:
        """Add the counts of another step."""
        self.prefix_queries += other.prefix_queries
        self.prefix_hits += other.prefix_hits
        self.external_queries += other.external_queries
        self.external_hits += other.external_hits
        self.computed_tokens += other.computed_tokens
        self.output_tokens += other.output_tokens
        self.busy_s += other.busy_s
        self.request_s += other.request_s
        if other.drafts.drafts:
            self.drafts.add(other.drafts)

    def message(self) -> scheduler_pb2.EngineCounts:
        """Make the message for a heartbeat."""
        return scheduler_pb2.EngineCounts(
            prefix_queries=self.prefix_queries,
            prefix_hits=self.prefix_hits,
            external_queries=self.external_queries,
            external_hits=self.external_hits,
            drafts=self.drafts.drafts,
            drafted_tokens=self.drafts.drafted_tokens,
            accepted_by_position=self.drafts.accepted,
            computed_tokens=self.computed_tokens,
            output_tokens=self.output_tokens,
            busy_s=self.busy_s,
            request_s=self.request_s,
        )
