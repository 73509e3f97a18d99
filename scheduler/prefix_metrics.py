"""Prometheus metrics of the scheduler's prefix knowledge."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

from baton.scheduler.booking import Assignment
from baton.scheduler.prefixes.ledger import PrefixLedger

_HOLDS = ("some", "nothing", "unknown")


class PrefixMetrics:
    """Hold one scheduler's metrics, in its registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.placements = Counter(
            "baton_scheduler_prefix_placements",
            "Placements, by what the worker that runs the prompt holds of it",
            ["holds"],
            registry=registry,
        )
        for holds in _HOLDS:
            self.placements.labels(holds)
        self.tokens = Counter(
            "baton_scheduler_prefix_tokens",
            "Prompt tokens that the workers they were placed on hold, as far as is known",
            registry=registry,
        )
        self.blocks = Gauge(
            "baton_scheduler_prefix_blocks",
            "KV blocks of which it is known who holds them",
            registry=registry,
        )
        self.workers = Gauge(
            "baton_scheduler_prefix_workers", "Workers of which it is known what they hold", registry=registry
        )
        self.unknown = Gauge(
            "baton_scheduler_prefix_workers_unknown",
            "Workers that take requests and of which it is not known what they hold",
            registry=registry,
        )
        self.coarseness = Gauge(
            "baton_scheduler_prefix_coarseness_blocks",
            "Distance of the blocks of a prompt that are known where memory is shortest; 1: all are",
            registry=registry,
        )
        self.gaps = Counter(
            "baton_scheduler_prefix_gaps",
            "Messages about caches that did not follow on what was known: the worker sends again",
            registry=registry,
        )
        self._gaps_seen = 0

    def placed(self, assigned: Assignment) -> None:
        held = assigned.held
        self.placements.labels("unknown" if held is None else "some" if held else "nothing").inc()
        self.tokens.inc(held or 0)

    def seen(self, ledger: PrefixLedger, unknown: int) -> None:
        self.blocks.set(len(ledger.index))
        self.workers.set(len(ledger))
        self.unknown.set(unknown)
        self.coarseness.set(ledger.index.coarseness)
        self.gaps.inc(ledger.gaps - self._gaps_seen)
        self._gaps_seen = ledger.gaps
