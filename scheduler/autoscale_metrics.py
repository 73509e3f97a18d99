"""Prometheus metrics of the autoscaler. Schedulers that do not decide report zeros."""

from __future__ import annotations

from dataclasses import asdict

from baton.autoscale.controller import Decision
from baton.metrics import Metrics, counter, gauge, histogram


class AutoscaleMetrics(Metrics):
    """One scheduler's figures of autoscaling."""

    prefix = "baton_scheduler_autoscale_"

    leads = gauge("1 while this scheduler decides on the numbers")
    _wanted_workers = gauge("Workers that the goals need for the present demand", "role")
    _orders = counter("Orders given: start (a worker), stop (drain one) or flip (change a role)", "order")
    _prefill_backlog_seconds = gauge("Work that waits on each prefill worker, on the mean")
    _decode_occupancy = gauge(
        "Share of the decode workers' batches, or of what their KV caches hold, that is in use"
    )
    _predicted = gauge("Prediction for 30 s that are over: rates a second, shares within the goals", "what")
    _came = gauge("What came in those 30 s", "what")
    _error_percent = gauge("Difference of the two: per cent of a rate that came, points of a share", "what")
    _step_seconds = histogram("Time to decide")

    def decided(self, decision: Decision, took_s: float) -> None:
        """Show a decision."""
        self._step_seconds.observe(took_s)
        self._wanted_workers.labels("prefill").set(decision.wanted.prefill)
        self._wanted_workers.labels("decode").set(decision.wanted.decode)
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
        """Count orders of one kind: start, stop or flip."""
        self._orders.labels(order).inc(count)
