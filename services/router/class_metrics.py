"""The router's metrics by class of requests. There are as many classes as the configuration names."""

from __future__ import annotations

import math
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from baton.metrics import SECONDS
from baton.services.classes import ServiceClass
from baton.services.router.state import RequestState

_KINDS = ("pair", "alone")
_MET = ("yes", "no")


class ClassMetrics:
    """Counters of each class: observed at a request's beginning and end, never per token."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._goals = Counter(
            "baton_router_class_goals_total",
            "Requests of a class, by goal (ttft or itl), by its last placement's kind (pair or alone) and "
            "by whether the goal was met; those that clients gave up do not count",
            ["class", "goal", "kind", "met"],
            registry=registry,
        )
        self._tokens = Counter(
            "baton_router_class_output_tokens_total",
            "Tokens generated for requests of a class that are over",
            ["class"],
            registry=registry,
        )
        self._waiting = Gauge(
            "baton_router_class_waiting_requests",
            "Requests of a class that wait for room on the workers",
            ["class"],
            registry=registry,
        )
        self._first_token = Histogram(
            "baton_router_class_time_to_first_token_seconds",
            "From the arrival of a class's request to its first token",
            ["class"],
            buckets=SECONDS,
            registry=registry,
        )
        self._gap = Histogram(
            "baton_router_class_mean_gap_seconds",
            "Mean gap between the tokens of an answer, of a class's requests that are over",
            ["class"],
            buckets=SECONDS,
            registry=registry,
        )

    def expect(self, classes: Iterable[ServiceClass]) -> None:
        """Show the series of all classes from 0 on: Prometheus sees no increase from nothing to 1."""
        for one in classes:
            self._waiting.labels(one.name)
            self._tokens.labels(one.name)
            for goal, value in (("ttft", one.ttft_s), ("itl", one.itl_s)):
                for kind in _KINDS if value else ():
                    for met in _MET:
                        self._goals.labels(one.name, goal, kind, met)

    def waiting(self, service: ServiceClass, change: int) -> None:
        """Count a request that waits (1), or no longer does (-1)."""
        self._waiting.labels(service.name).inc(change)

    def over(self, state: RequestState) -> None:
        """Count a request that has its outcome."""
        service, gaps = state.service, len(state.tokens) - 1
        self._tokens.labels(service.name).inc(len(state.tokens))
        ttft = state.first_token - state.http.arrived if state.first_token else math.inf
        if state.first_token:
            self._first_token.labels(service.name).observe(ttft)
        if state.outcome != "abort":
            self._count(state, "ttft", service.ttft_s, ttft)
        if state.first_token and gaps > 0:
            gap = max(0.0, state.timings.last_token - state.first_token) / gaps
            self._gap.labels(service.name).observe(gap)
            if state.outcome != "abort":
                self._count(state, "itl", service.itl_s, gap)

    def _count(self, state: RequestState, goal: str, most_s: float | None, seconds: float) -> None:
        if most_s is not None:
            pair = state.timings.prefiller != state.timings.decoder
            met = "yes" if seconds <= most_s else "no"
            self._goals.labels(state.service.name, goal, "pair" if pair else "alone", met).inc()
