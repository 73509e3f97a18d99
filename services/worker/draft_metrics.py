"""Export a worker's draft metrics to Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter

from baton.metrics import Metrics, counter, gauge
from baton.services.decode.acceptance import DraftCounts


class DraftMetrics(Metrics):
    """The draft metrics of one method. `position` counts from 0, as in vLLM."""

    prefix = "baton_worker_"

    _drafts = counter("Drafts verified, one per request and step", "method")
    _drafted_tokens = counter("Tokens drafted", "method")
    _accepted_tokens = counter("Drafted tokens accepted", "method")
    _drafted_tokens_by_position = counter(
        "Drafted tokens by position in the draft", "method", "source", "position"
    )
    _accepted_tokens_by_position = counter(
        "Accepted tokens by position in the draft", "method", "source", "position"
    )
    _mean_accepted_length = gauge("Tokens gained in a step with a draft, last minute", "method")
    _first_position_acceptance_ratio = gauge("Accepted share of first drafted tokens, last minute", "method")
    _acceptance_reference_ratio = gauge("Reference for first-position acceptance; 0: not known yet", "method")
    draft_length = gauge("Maximum length of the next draft", "method")
    acceptance_alarm = gauge("1 while acceptance is significantly too low", "method")

    def __init__(self, registry: CollectorRegistry, method: str, limit: int, model_positions: int) -> None:
        """Register metrics of drafts of up to `limit` tokens.

        A draft model drafts the first `model_positions` tokens, text matching the others. In a hybrid, a long
        match may also replace the model's tokens.
        """
        super().__init__(registry, method=method)
        from_model = "model" if model_positions == limit else "either"
        sources = [from_model if position < model_positions else "match" for position in range(limit)]

        def by_position(family: Counter) -> list[Counter]:
            return [family.labels(method, source, str(at)) for at, source in enumerate(sources)]

        self._drafted_at = by_position(self._drafted_tokens_by_position)
        self._accepted_at = by_position(self._accepted_tokens_by_position)
        self.draft_length.set(limit)

    def count(self, counts: DraftCounts) -> None:
        self._drafts.inc(counts.drafts)
        self._drafted_tokens.inc(counts.drafted_tokens)
        self._accepted_tokens.inc(counts.accepted_tokens)
        for family, tokens in ((self._drafted_at, counts.drafted), (self._accepted_at, counts.accepted)):
            for position, number in enumerate(tokens):
                if number:
                    family[position].inc(number)

    def show(self, recent: DraftCounts, reference: float) -> None:
        """Set the gauges of the last minute."""
        self._mean_accepted_length.set(recent.mean_accepted_length)
        self._first_position_acceptance_ratio.set(recent.first_acceptance)
        self._acceptance_reference_ratio.set(reference)
