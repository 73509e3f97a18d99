"""Count this worker's drafts, report them to the scheduler, and raise the alarm if too few are accepted.

Everything runs in the event loop's thread.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter

from baton.metrics import Metrics, counter, gauge
from baton.protos import scheduler_pb2
from baton.services.config import EngineSettings
from baton.services.decode.acceptance import AcceptanceWatch, DraftCounts, RecentDrafts
from baton.services.decode.proposers import validation
from baton.services.decode.proposers.hybrid import model_steps

logger = logging.getLogger(__name__)

IDLE_STEPS = 500  # this many decode steps in a row without a draft are logged
# vLLM's names of methods without a draft model.
_FROM_TOKENS = frozenset({"ngram", "ngram_gpu", "suffix", "custom_class"})


@dataclass(frozen=True)
class DraftMethod:
    name: str  # label in metrics: mtp, ngram, mtp+suffix
    limit: int  # maximum number of drafted tokens per request and step
    model_positions: int  # leading positions that a draft model drafts

    @property
    def has_state(self) -> bool:
        return self.model_positions > 0


def method_of(engine: EngineSettings) -> DraftMethod | None:
    """Return the drafting method, or None without speculation. Raises ConfigError for impossible settings."""
    spec, method = engine.speculative_config, validation.check(engine)
    if spec is None or method is None:
        return None
    if method.engine_config(spec)["method"] in _FROM_TOKENS:
        return DraftMethod(method.name, spec.limit, 0)
    if spec.mtp_strategy == "default":
        return DraftMethod(method.name, spec.limit, spec.limit)
    continued = spec.mtp_strategy.removeprefix("with_")
    return DraftMethod(f"{method.name}+{continued}", spec.limit, model_steps(spec))


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

        A draft model drafts the first `model_positions` tokens, and text matching drafts the others. In a
        hybrid, a long match may also replace the model's tokens.
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
        self._mean_accepted_length.set(recent.mean_accepted_length)
        self._first_position_acceptance_ratio.set(recent.first_acceptance)
        self._acceptance_reference_ratio.set(reference)


class Drafting:
    def __init__(self, method: DraftMethod, reference: float | None, registry: CollectorRegistry) -> None:
        """Expect `reference`, the acceptance rate of the first drafted position; learn it if None."""
        self.method = method
        self._metrics = DraftMetrics(registry, method.name, method.limit, method.model_positions)
        self._watch = AcceptanceWatch(configured=reference, learns=method.has_state)
        self._recent = RecentDrafts()
        self._length = method.limit
        self._alarm = False
        self._idle_steps = 0

    def on_step(self, counts: DraftCounts, length: int | None) -> None:
        """Count a decode step. `length`: maximum length of the next draft; None: the method's limit."""
        self._length = self.method.limit if length is None else length
        self._metrics.draft_length.set(self._length)
        if not counts.drafts:
            self._idle_steps += 1
            if self._idle_steps == IDLE_STEPS:
                logger.info("%s has drafted nothing for %d steps", self.method.name, IDLE_STEPS)
            return
        self._idle_steps = 0
        self._metrics.count(counts)
        self._recent.add(counts, time.monotonic())
        self._watch.drafted(counts)
        self._tell()

    def on_request(self, drafts: int, first_accepted: int) -> None:
        """Count a finished request by its drafts, and how many had their first token accepted."""
        self._watch.finished(drafts, first_accepted)
        self._tell()

    def hear(self, peer_reference: float) -> None:
        """Set the best reference of other workers with this method; 0 if there is none."""
        self._watch.hear(peer_reference)
        self._tell()

    def report(self) -> scheduler_pb2.Drafting:
        """Return the report for the next heartbeat, and set the gauges of the last minute."""
        recent = self._recent.total(time.monotonic())
        self._metrics.show(recent, self._watch.reference)
        return scheduler_pb2.Drafting(
            draft_length=self._length,
            drafts=recent.drafts,
            first_acceptance=recent.first_acceptance,
            mean_accepted_length=recent.mean_accepted_length,
            learned_reference=self._watch.learned,
            alarm=self._watch.alarm,
        )

    def _tell(self) -> None:
        alarm = self._watch.alarm
        if alarm == self._alarm:
            return
        self._alarm = alarm
        self._metrics.acceptance_alarm.set(alarm)
        if alarm:
            logger.warning("acceptance of %s drafts is too low: %s", self.method.name, self._watch.why)
        else:
            logger.warning("acceptance of %s drafts is normal again", self.method.name)
