"""The scheduler's figures, for Prometheus."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Self
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from baton.protos import scheduler_pb2 as pb
from baton.scheduler.autoscale_metrics import AutoscaleMetrics
from baton.scheduler.errors import ListenFailed
from baton.scheduler.types import FleetView

_PLACE_BUCKETS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)  # s


class Metrics:
    """One scheduler's figures, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
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
            "baton_scheduler_place_seconds", "Time to place", buckets=_PLACE_BUCKETS, registry=self.registry
        )
        self.stale_epochs = Counter(
            "baton_scheduler_stale_epochs",
            "Late messages, with an older epoch than the last one of the request or the worker; refused",
            ["what"],
            registry=self.registry,
        )
        self.adopted = Counter(
            "baton_scheduler_adopted",
            "Attempts booked by routers' reports: placed without a scheduler, or lost by it",
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
            "1 while the store answers, 0 while memory stands in for it",
            registry=self.registry,
        )

        self.autoscale = AutoscaleMetrics(self.registry)

    def stale(self, what: str, count: int = 1) -> None:
        """Count late messages of a kind: placement, report or worker."""
        self.stale_epochs.labels(what).inc(count)

    def rejected(self, code: pb.Rejection.Code) -> None:
        """Count a rejection."""
        self.rejections.labels(short_name(pb.Rejection.Code.Name(code), "CODE_")).inc()

    def seen(self, view: FleetView) -> None:
        """Set the gauges from a fresh view."""
        self.live_attempts.set(view.live_attempts)
        self.workers.clear()
        for worker in view.workers.values():
            role = short_name(pb.Role.Name(worker.role), "ROLE_")
            state = (
                "drained" if worker.held else short_name(pb.WorkerState.Name(worker.state), "WORKER_STATE_")
            )
            self.workers.labels(role, state).inc()


class MetricsServer:
    """Serves the figures over HTTP, in a thread, while entered. Port 0 takes a free one."""

    def __init__(self, metrics: Metrics, host: str, port: int) -> None:
        self._metrics = metrics
        self._address = (host, port)
        self._running: tuple[WSGIServer, threading.Thread] | None = None

    @property
    def port(self) -> int:
        """The port that was taken, once entered."""
        return self._running[0].server_port if self._running else self._address[1]

    def __enter__(self) -> Self:
        """Begin to serve. Raises ListenFailed."""
        host, port = self._address
        try:
            self._running = start_http_server(port, addr=host, registry=self._metrics.registry)
        except OSError as error:
            text = error.strerror or str(error)
            raise ListenFailed(
                f"metrics cannot be served on {host}:{port}: {text}; choose another port"
            ) from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._running:
            server, thread = self._running
            server.shutdown()
            server.server_close()
            thread.join(timeout=5)
            self._running = None


def short_name(name: str, prefix: str) -> str:
    """Return an enum's name without its prefix, in lower case: ROLE_PREFILL -> prefill."""
    return name.removeprefix(prefix).lower()
