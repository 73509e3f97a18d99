"""Prometheus metrics of the scheduler."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import asdict

from prometheus_client import CollectorRegistry

from baton import metrics as baton_metrics
from baton.autoscale.controller import Decision
from baton.autoscale.orders import SCALED
from baton.enums import role_name, state_name
from baton.metrics import counter, gauge, histogram
from baton.protos import scheduler_pb2 as pb
from baton.scheduler.booking import Assignment
from baton.scheduler.need import Need
from baton.scheduler.prefixes.prefix_ledger import PrefixLedger
from baton.scheduler.types import FleetView

_ROLES = ("prefill", "decode", "mixed", "encode")

log = logging.getLogger(__name__)


class AutoscaleMetrics(baton_metrics.Metrics):
    prefix = "baton_scheduler_autoscale_"

    leads = gauge("1 while this scheduler decides")
    _wanted_workers = gauge("Workers that the goals need now", "role")
    _orders = counter("Orders given: start, stop (drain) or flip (role)", "order")
    _prefill_backlog_seconds = gauge("Mean work waiting on a prefill worker")
    _decode_occupancy = gauge("Used share of the decode workers' slots")
    _predicted = gauge("Prediction for the last 30 s: rates per second, shares within goals", "what")
    _came = gauge("Actual values for the predicted 30 s", "what")
    _error_percent = gauge("Error of the prediction: percent of a rate, points of a share", "what")
    _step_seconds = histogram("Time to decide")

    def decided(self, decision: Decision, took_s: float) -> None:
        self._step_seconds.observe(took_s)
        for role in SCALED:
            self._wanted_workers.labels(role_name(role)).set(decision.wanted.of(role))
        self._prefill_backlog_seconds.set(decision.backlog_s)
        self._decode_occupancy.set(decision.occupancy)
        if decision.settled is None:
            return
        predicted, came = decision.settled.predicted, decision.settled.came
        for shown, outlook in ((self._predicted, predicted), (self._came, came)):
            for what, value in asdict(outlook).items():
                if value is not None:
                    shown.labels(what).set(value)
        for what, value in predicted.errors(came).items():
            self._error_percent.labels(what).set(value)

    def ordered(self, order: str, count: int) -> None:
        self._orders.labels(order).inc(count)


class PrefixMetrics(baton_metrics.Metrics):
    prefix = "baton_scheduler_prefix_"

    placements = counter("Placements, by whether the prompt's worker holds any of it", "holds")
    tokens = counter("Prompt tokens that their worker already holds")
    blocks = gauge("KV blocks with known holders")
    workers = gauge("Workers with known caches")
    workers_unknown = gauge("Serving workers with unknown caches")
    coarseness_blocks = gauge("Distance between kept blocks where the index is fullest; 1: all are kept")
    gaps = counter("Gaps in workers' cache logs, sent again")

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        for holds in ("some", "nothing", "unknown"):
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


class Metrics(baton_metrics.Metrics):
    """One scheduler's metrics, in their own registry."""

    prefix = "baton_scheduler_"

    _placements = counter("Placements: pair, alone, or encode (an image)", "kind")
    rejections = counter("Placements refused, by code", "code")
    place_seconds = histogram("Time to place")
    stale_epochs = counter("Messages refused for an older epoch", "what")
    adopted = counter("Attempts learned from routers' reports")
    role_changes = counter("Role changes, by an operator or for balance", "by")
    leases_expired = counter("Attempts not renewed in time")
    live_attempts = gauge("Attempts under way")
    workers = gauge("Workers alive", "role", "state")
    gangs = gauge("Gangs: ready or forming, which includes draining ones", "role", "state")
    store_up = gauge("1 while the store answers")
    store_losses = counter("Times that the store stopped answering")
    workers_lost = counter("Workers silent for scheduler.worker_lease_s that had not deregistered", "role")

    def __init__(self) -> None:
        self.registry = baton_metrics.registry()
        super().__init__(self.registry)
        for role in _ROLES:
            self.workers_lost.labels(role)  # start at 0: Prometheus sees no increase from nothing to 1
        self.autoscale = AutoscaleMetrics(self.registry)
        self.prefixes = PrefixMetrics(self.registry)
        self._there: dict[str, pb.Role] = {}  # live workers as of the last `lost`

    def placed(self, need: Need, assigned: Assignment) -> None:
        kind = "encode" if need.encode else "pair" if assigned.prefill else "alone"
        self._placements.labels(kind).inc()
        if not need.encode:
            self.prefixes.placed(assigned)

    def stale(self, what: str, count: int = 1) -> None:
        """Count late messages of a kind: placement, report or worker."""
        self.stale_epochs.labels(what).inc(count)

    def rejected(self, code: pb.Rejection.Code) -> None:
        self.rejections.labels(pb.Rejection.Code.Name(code).removeprefix("CODE_").lower()).inc()

    def seen(self, view: FleetView, live_attempts: int) -> None:
        self.live_attempts.set(live_attempts)
        self.workers.clear()
        self.gangs.clear()
        for unit in view.units():
            if unit[0].gang is not None:
                state = "ready" if unit[0].placeable else "forming"
                self.gangs.labels(role_name(unit[0].role), state).inc()
        for role in _ROLES:
            self.workers.labels(role, "ready").set(0)
        for worker in view.workers.values():
            role = role_name(worker.role)
            state = "drained" if worker.held else state_name(worker.state)
            self.workers.labels(role, state).inc()

    def lost(self, view: FleetView, left: Iterable[str], *, unsure: bool) -> None:
        """Count the workers that were in the last view and are not in this one.

        left: workers that deregistered. unsure: live workers may not have registered again yet, so losses are
        counted later.
        """
        there = {key: one.role for key, one in view.workers.items()}
        gone = {key: role for key, role in self._there.items() if key not in there and key not in set(left)}
        if unsure:
            self._there = {**gone, **there}
            return
        for key, role in gone.items():
            log.warning("lost the %s worker %s: it sent nothing for a lease", role_name(role), key)
            self.workers_lost.labels(role_name(role)).inc()
        self._there = there
