"""Prometheus metrics of the scheduler."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import Counter, Gauge, Histogram

from baton import metrics
from baton.metrics import SECONDS
from baton.protos import scheduler_pb2 as pb
from baton.scheduler.autoscale_metrics import AutoscaleMetrics
from baton.scheduler.prefix_metrics import PrefixMetrics
from baton.scheduler.types import FleetView

_ROLES = ("prefill", "decode", "mixed")


class Metrics:
    """Hold one scheduler's metrics, in their own registry."""

    def __init__(self) -> None:
        self.registry = metrics.registry()
        self.placements = Counter(
            "baton_scheduler_placements",
            "Placements, by whether a handoff follows",
            ["kind"],
            registry=self.registry,
        )
        self.rejections = Counter(
            "baton_scheduler_rejections", "Placements refused, by code", ["code"], registry=self.registry
        )
        self.place_seconds = Histogram(
            "baton_scheduler_place_seconds", "Time to place", buckets=SECONDS, registry=self.registry
        )
        self.stale_epochs = Counter(
            "baton_scheduler_stale_epochs",
            "Late messages, with an older epoch than the last one of the request or the worker; refused",
            ["what"],
            registry=self.registry,
        )
        self.adopted = Counter(
            "baton_scheduler_adopted",
            "Attempts booked by routers' reports: placed by another scheduler or by none, or lost here",
            registry=self.registry,
        )
        self.flips = Counter(
            "baton_scheduler_role_changes",
            "Workers that changed their role, asked by an operator or for balance",
            ["by"],
            registry=self.registry,
        )
        self.leases_expired = Counter(
            "baton_scheduler_leases_expired", "Attempts not renewed in time", registry=self.registry
        )
        self.live_attempts = Gauge(
            "baton_scheduler_live_attempts", "Attempts under way", registry=self.registry
        )
        self.workers = Gauge(
            "baton_scheduler_workers", "Workers alive", ["role", "state"], registry=self.registry
        )
        self.store_up = Gauge(
            "baton_scheduler_store_up",
            "1 while the store answers, 0 while it does not",
            registry=self.registry,
        )
        self.store_losses = Counter(
            "baton_scheduler_store_losses",
            "Times that the store was there and did not answer any more",
            registry=self.registry,
        )
        self.workers_lost = Counter(
            "baton_scheduler_workers_lost",
            "Workers not heard of for a lease (scheduler.worker_lease_s) that had not said goodbye",
            ["role"],
            registry=self.registry,
        )
        for role in _ROLES:
            # start at 0: Prometheus sees no increase when a series appears at 1
            self.workers_lost.labels(role)
        self.autoscale = AutoscaleMetrics(self.registry)
        self.prefixes = PrefixMetrics(self.registry)

    def stale(self, what: str, count: int = 1) -> None:
        """Count late messages of a kind: placement, report or worker."""
        self.stale_epochs.labels(what).inc(count)

    def rejected(self, code: pb.Rejection.Code) -> None:
        self.rejections.labels(short_name(pb.Rejection.Code.Name(code), "CODE_")).inc()

    def seen(self, view: FleetView, live_attempts: int) -> None:
        """Set the gauges from a fresh view."""
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
        """Count lost workers of these roles."""
        for role in roles:
            self.workers_lost.labels(role_of(role)).inc()


def role_of(role: pb.Role) -> str:
    """Return a role's name: prefill, decode or mixed."""
    return short_name(pb.Role.Name(role), "ROLE_")


def short_name(name: str, prefix: str) -> str:
    """Return an enum's name without its prefix, in lower case: ROLE_PREFILL -> prefill."""
    return name.removeprefix(prefix).lower()
