"""Prometheus metrics of the scheduler's prefix knowledge."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from baton.metrics import Metrics, counter, gauge
from baton.scheduler.booking import Assignment
from baton.scheduler.prefixes.ledger import PrefixLedger

_HOLDS = ("some", "nothing", "unknown")


class PrefixMetrics(Metrics):
    prefix = "baton_scheduler_prefix_"

    placements = counter("Placements, by what the prompt's worker holds of it", "holds")
    tokens = counter("Prompt tokens that their worker already holds")
    blocks = gauge("KV blocks with known holders")
    workers = gauge("Workers with known caches")
    workers_unknown = gauge("Serving workers with unknown caches")
    coarseness_blocks = gauge("Distance between kept blocks where the index is fullest; 1: all are kept")
    gaps = counter("Gaps in workers' cache logs, sent again")

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
