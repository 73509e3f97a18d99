"""Count an engine's work, in one step or, for the heartbeat, since it started."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

from baton.protos import scheduler_pb2
from baton.services.decode.acceptance import DraftCounts


@dataclass(slots=True)
class Counts:
    """Counts of an engine's work. As in vLLM, lookups are counted when their request is admitted."""

    prefix_queries: int = 0  # prompt tokens looked up in the prefix cache
    prefix_hits: int = 0
    external_queries: int = 0  # prompt tokens not in the prefix cache, for which a handoff was asked
    external_hits: int = 0
    drafts: DraftCounts = field(default_factory=DraftCounts)  # verified drafts
    computed_tokens: int = 0  # prompt tokens neither cached nor handed over
    output_tokens: int = 0
    busy_s: float = 0.0  # time spent in steps
    request_s: float = 0.0  # sum over steps of the step's time times the number of requests that got tokens

    def take(self, groups: Iterable[Any], seconds: float) -> None:
        """Add a step's outputs. seconds: its duration, or 0 if it computed nothing."""
        requests = 0
        for group in groups:
            if group.scheduler_stats is not None:  # vLLM attaches the stats to one of the groups
                self._take_stats(group.scheduler_stats)
            for output in group.outputs:
                requests += bool(output.new_token_ids)
                self.output_tokens += len(output.new_token_ids)
                if output.prefill_stats is not None:  # only a request's first output has these stats
                    self.computed_tokens += output.prefill_stats.num_computed_tokens
        self.busy_s += seconds
        self.request_s += seconds * requests

    def _take_stats(self, stats: Any) -> None:
        drafts = stats.spec_decoding_stats
        if drafts is not None:
            positions = drafts.num_draft_tokens_per_pos, drafts.num_accepted_tokens_per_pos
            self.drafts.add(DraftCounts(drafts.num_drafts, *positions))
        if stats.prefix_cache_stats is not None:
            self.prefix_queries += stats.prefix_cache_stats.queries
            self.prefix_hits += stats.prefix_cache_stats.hits
        if stats.connector_prefix_cache_stats is not None:
            self.external_queries += stats.connector_prefix_cache_stats.queries
            self.external_hits += stats.connector_prefix_cache_stats.hits

    def add(self, other: Counts) -> None:
        for name in _PLAIN:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        if other.drafts.drafts:
            self.drafts.add(other.drafts)

    def message(self) -> scheduler_pb2.EngineCounts:
        return scheduler_pb2.EngineCounts(
            **{name: getattr(self, name) for name in _PLAIN},
            drafts=self.drafts.drafts,
            drafted_tokens=self.drafts.drafted_tokens,
            accepted_by_position=self.drafts.accepted,
        )


_PLAIN = [field.name for field in fields(Counts) if field.name != "drafts"]
