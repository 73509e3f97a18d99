"""Prometheus metrics of the autoscaler. Schedulers that do not decide report zeros."""

from __future__ import annotations

from dataclasses import asdict

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from baton.autoscale.controller import Decision
from baton.metrics import SECONDS


class AutoscaleMetrics:
    """Hold one scheduler's autoscaling metrics."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.leads = Gauge(
            "baton_scheduler_autoscale_leads",
            "1 while this scheduler decides on the numbers",
            registry=registry,
        )
        self._wanted = Gauge(
            "baton_scheduler_autoscale_wanted_workers",
            "Workers that the goals need for the present demand",
            ["role"],
            registry=registry,
        )
        self._orders = Counter(
            "baton_scheduler_autoscale_orders",
            "Orders given: start (a worker), stop (drain one) or flip (change a role)",
            ["order"],
            registry=registry,
        )
        self._backlog = Gauge(
            "baton_scheduler_autoscale_prefill_backlog_seconds",
            "Work that waits on each prefill worker, on the mean",
            registry=registry,
        )
        self._occupancy = Gauge(
            "baton_scheduler_autoscale_decode_occupancy",
            "Share of the decode workers' batches, or of what their KV caches hold, that is in use",
            registry=registry,
        )
        self._predicted = Gauge(
            "baton_scheduler_autoscale_predicted",
            "Prediction for 30 s that are over: rates a second, shares within the goals",
            ["what"],
            registry=registry,
        )
        self._came = Gauge(
            "baton_scheduler_autoscale_came", "What came in those 30 s", ["what"], registry=registry
        )
        self._error = Gauge(
            "baton_scheduler_autoscale_error_percent",
            "Difference of the two: per cent of a rate that came, points of a share",
            ["what"],
            registry=registry,
        )
        self._step = Histogram(
            "baton_scheduler_autoscale_step_seconds",
            "Time to decide",
            buckets=SECONDS,
            registry=registry,
        )

    def decided(self, decision: Decision, took_s: float) -> None:
        self._step.observe(took_s)
        self._wanted.labels("prefill").set(decision.wanted.prefill)
        self._wanted.labels("decode").set(decision.wanted.decode)
        self._backlog.set(decision.backlog_s)
        self._occupancy.set(decision.occupancy)
        if decision.settled is None:
            return
        predicted, came = decision.settled.predicted, decision.settled.came
        for gauge, outlook in ((self._predicted, predicted), (self._came, came)):
            for what, value in asdict(outlook).items():
                if value is not None:
                    gauge.labels(what).set(value)
        for what, value in predicted.errors(came).items():
            self._error.labels(what).set(value)

    def ordered(self, order: str, count: int) -> None:
        """Count orders of one kind: start, stop or flip."""
        self._orders.labels(order).inc(count)
