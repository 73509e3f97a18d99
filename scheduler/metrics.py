"""Prometheus metrics of the scheduler."""

from __future__ import annotations

from collections.abc import Iterable

from baton import metrics as baton_metrics
from baton.metrics import counter, gauge, histogram
from baton.protos import scheduler_pb2 as pb
from baton.scheduler.autoscale_metrics import AutoscaleMetrics
from baton.scheduler.prefix_metrics import PrefixMetrics
from baton.scheduler.types import FleetView

_ROLES = ("prefill", "decode", "mixed")


class Metrics(baton_metrics.Metrics):
    """One scheduler's metrics, in their own registry."""

    prefix = "baton_scheduler_"

    placements = counter("Placements: pair or alone", "kind")
    rejections = counter("Placements refused, by code", "code")
    place_seconds = histogram("Time to place")
    stale_epochs = counter("Messages refused for an older epoch", "what")
    adopted = counter("Attempts learned from routers' reports")
    role_changes = counter("Role changes, by an operator or for balance", "by")
    leases_expired = counter("Attempts not renewed in time")
    live_attempts = gauge("Attempts under way")
    workers = gauge("Workers alive", "role", "state")
    store_up = gauge("1 while the store answers")
    store_losses = counter("Times that the store stopped answering")
    workers_lost = counter("Workers silent for scheduler.worker_lease_s without a farewell", "role")

    def __init__(self) -> None:
        self.registry = baton_metrics.registry()
        super().__init__(self.registry)
        for role in _ROLES:
            self.workers_lost.labels(role)  # start at 0: Prometheus sees no increase from nothing to 1
        self.autoscale = AutoscaleMetrics(self.registry)
        self.prefixes = PrefixMetrics(self.registry)

    def stale(self, what: str, count: int = 1) -> None:
        """Count late messages of a kind: placement, report or worker."""
        self.stale_epochs.labels(what).inc(count)

    def rejected(self, code: pb.Rejection.Code) -> None:
        self.rejections.labels(short_name(pb.Rejection.Code.Name(code), "CODE_")).inc()

    def seen(self, view: FleetView, live_attempts: int) -> None:
        self.live_attempts.set(live_attempts)
        self.workers.clear()
        for role in _ROLES:
            self.workers.labels(role, "ready").set(0)
        for worker in view.workers.values():
            role = role_of(worker.role)
            state = (
                "drained" if worker.held else short_name(pb.WorkerState.Name(worker.state), "WORKER_STATE_")
            )
            self.workers.labels(role, state).inc()

    def lost(self, roles: Iterable[pb.Role]) -> None:
        for role in roles:
            self.workers_lost.labels(role_of(role)).inc()


def role_of(role: pb.Role) -> str:
    """Return a role's name: prefill, decode or mixed."""
    return short_name(pb.Role.Name(role), "ROLE_")


def short_name(name: str, prefix: str) -> str:
    """Return the name of an enum value without its prefix: ROLE_PREFILL -> prefill."""
    return name.removeprefix(prefix).lower()
