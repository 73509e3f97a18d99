"""Counts of an engine's work, in one step or since it began; the heartbeat carries the latter."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.protos import scheduler_pb2
from baton.services.decode.acceptance import DraftCounts


@dataclass(slots=True)
class Counts:
    """Prompt tokens, each counted when its request is admitted, as vLLM counts, and drafts."""

    prefix_queries: int = 0  # looked up in the prefix cache
    prefix_hits: int = 0
    external_queries: int = 0  # asked of the handoff, beyond those hits
    external_hits: int = 0
    drafts: DraftCounts = field(default_factory=DraftCounts)  # verified

    def add(self, other: Counts) -> None:
        """Add the counts of another step."""
        self.prefix_queries += other.prefix_queries
        self.prefix_hits += other.prefix_hits
        self.external_queries += other.external_queries
        self.external_hits += other.external_hits
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
        )
