"""Export a worker's draft figures to Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

from baton.services.decode.acceptance import DraftCounts


class DraftMetrics:
    """The draft metrics of one method. `position` counts from 0, as in vLLM."""

    def __init__(self, registry: CollectorRegistry, method: str, limit: int, model_positions: int) -> None:
        """Register metrics of drafts of up to `limit` tokens.

        A draft model drafts the first `model_positions` tokens, text matching the others. In a hybrid, a long
        match may also replace the model's tokens.
        """
        from_model = "model" if model_positions == limit else "either"

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"baton_worker_{name}", text, ["method"], registry=registry).labels(method)

        def counter(name: str, text: str) -> Counter:
            return Counter(f"baton_worker_{name}", text, ["method"], registry=registry).labels(method)

        def by_position(name: str, text: str) -> list[Counter]:
            labels = ["method", "source", "position"]
            family = Counter(f"baton_worker_{name}", text, labels, registry=registry)
            return [
                family.labels(method, from_model if position < model_positions else "match", str(position))
                for position in range(limit)
            ]

        self._drafts = counter("drafts", "Drafts verified, one per request and step")
        self._drafted = counter("drafted_tokens", "Tokens drafted")
        self._accepted = counter("accepted_tokens", "Drafted tokens accepted")
        self._drafted_at = by_position(
            "drafted_tokens_by_position", "Drafted tokens by position in the draft"
        )
        self._accepted_at = by_position(
            "accepted_tokens_by_position", "Accepted tokens by position in the draft"
        )
        self._mean = gauge("mean_accepted_length", "Tokens gained in a step with a draft, last minute")
        self._first = gauge(
            "first_position_acceptance_ratio", "Accepted share of first drafted tokens, last minute"
        )
        self._reference = gauge(
            "acceptance_reference_ratio", "Reference for first-position acceptance; 0: not known yet"
        )
        self.length = gauge("draft_length", "Maximum length of the next draft")
        self.alarm = gauge("acceptance_alarm", "1 while acceptance is significantly too low")
        self.length.set(limit)

    def count(self, counts: DraftCounts) -> None:
        self._drafts.inc(counts.drafts)
        self._drafted.inc(counts.drafted_tokens)
        self._accepted.inc(counts.accepted_tokens)
        for position, drafted in enumerate(counts.drafted):
            if drafted:
                self._drafted_at[position].inc(drafted)
        for position, accepted in enumerate(counts.accepted):
            if accepted:
                self._accepted_at[position].inc(accepted)

    def show(self, recent: DraftCounts, reference: float) -> None:
        """Set the gauges of the last minute."""
        self._mean.set(recent.mean_accepted_length)
        self._first.set(recent.first_acceptance)
        self._reference.set(reference)
