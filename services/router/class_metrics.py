"""The router's metrics by service class."""

from __future__ import annotations

import math
from collections.abc import Iterable

from baton.metrics import Metrics, counter, gauge, histogram
from baton.services.classes import ServiceClass
from baton.services.router.state import RequestState

_KINDS = ("pair", "alone")
_MET = ("yes", "no")


class ClassMetrics(Metrics):
    """Metrics of each class, updated when a request begins and ends, never per token."""

    prefix = "baton_router_class_"

    _goals = counter(
        "Requests by goal (ttft, itl), placement and whether it was met; without aborted ones",
        *("class", "goal", "kind", "met"),
    )
    _output_tokens = counter("Output tokens of finished requests", "class")
    _waiting_requests = gauge("Requests waiting for room on workers", "class")
    _time_to_first_token_seconds = histogram("From arrival to first token", "class")
    _mean_gap_seconds = histogram("Mean gap between the tokens of a finished answer", "class")

    def expect(self, classes: Iterable[ServiceClass]) -> None:
        """Create the series of all classes at 0: Prometheus sees no increase when a series begins at 1."""
        for one in classes:
            self._waiting_requests.labels(one.name)
            self._output_tokens.labels(one.name)
            for goal, value in (("ttft", one.ttft_s), ("itl", one.itl_s)):
                for kind in _KINDS if value else ():
                    for met in _MET:
                        self._goals.labels(one.name, goal, kind, met)

    def waiting(self, service: ServiceClass, change: int) -> None:
        """Count a request that joins the queue (1) or leaves it (-1)."""
        self._waiting_requests.labels(service.name).inc(change)

    def over(self, state: RequestState) -> None:
        """Count a finished request."""
        service, gaps = state.service, len(state.tokens) - 1
        self._output_tokens.labels(service.name).inc(len(state.tokens))
        ttft = state.first_token - state.http.arrived if state.first_token else math.inf
        if state.first_token:
            self._time_to_first_token_seconds.labels(service.name).observe(ttft)
        if state.outcome != "abort":
            self._count(state, "ttft", service.ttft_s, ttft)
        if state.first_token and gaps > 0:
            gap = max(0.0, state.timings.last_token - state.first_token) / gaps
            self._mean_gap_seconds.labels(service.name).observe(gap)
            if state.outcome != "abort":
                self._count(state, "itl", service.itl_s, gap)

    def _count(self, state: RequestState, goal: str, most_s: float | None, seconds: float) -> None:
        if most_s is not None:
            pair = state.timings.prefiller != state.timings.decoder
            met = "yes" if seconds <= most_s else "no"
            self._goals.labels(state.service.name, goal, "pair" if pair else "alone", met).inc()
