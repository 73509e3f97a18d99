"""Prometheus metrics of the autoscaler. Schedulers that do not decide report zeros."""

from __future__ import annotations

from dataclasses import asdict

from baton.autoscale.controller import Decision
from baton.metrics import Metrics, counter, gauge, histogram


class AutoscaleMetrics(Metrics):
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
        self._orders.labels(order).inc(count)
