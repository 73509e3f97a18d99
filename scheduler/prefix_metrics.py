"""Prometheus metrics of the scheduler's prefix knowledge."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from baton.metrics import Metrics, counter, gauge
from baton.scheduler.booking import Assignment
from baton.scheduler.prefixes.ledger import PrefixLedger

_HOLDS = ("some", "nothing", "unknown")


class PrefixMetrics(Metrics):
    """One scheduler's figures of prefixes, in its registry."""

    prefix = "baton_scheduler_prefix_"

    placements = counter("Placements, by what the worker that runs the prompt holds of it", "holds")
    tokens = counter("Prompt tokens that the workers they were placed on hold, as far as is known")
    blocks = gauge("KV blocks of which it is known who holds them")
    workers = gauge("Workers of which it is known what they hold")
    workers_unknown = gauge("Workers that take requests and of which it is not known what they hold")
    coarseness_blocks = gauge(
        "Distance of the blocks of a prompt that are known where memory is shortest; 1: all are"
    )
    gaps = counter("Messages about caches that did not follow on what was known: the worker sends again")

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        for holds in _HOLDS:
            self.placements.labels(holds)
        self._gaps_seen = 0

    def placed(self, assigned: Assignment) -> None:
        held = assigned.held
        self.placements.labels("unknown" if held is None else "some" if held else "nothing").inc()
        self.tokens.inc(held or 0)

    def seen(self, ledger: PrefixLedger, unknown: int) -> None:
        self.blocks.set(len(ledger.index))
        self.workers.set(len(ledger))
        self.workers_unknown.set(unknown)
        self.coarseness_blocks.set(ledger.index.coarseness)
        self.gaps.inc(ledger.gaps - self._gaps_seen)
        self._gaps_seen = ledger.gaps
