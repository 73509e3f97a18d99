"""What the router counts, beside vLLM's own figures in the same /metrics.

Histograms are of one request each, so nothing here is touched per token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sized
from typing import Protocol

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from baton.protos import handoff_pb2, worker_pb2
from baton.scheduler.client import Placement
from baton.services.router.journal import Journal
from baton.services.router.state import RequestState
from baton.services.router.worker_series import WorkerSeries

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
_STAGES = ("wait_ms", "move_ms", "check_ms", "load_ms", "total_ms")


class Waiting(Sized, Protocol):
    """The requests that wait, as many as its length."""

    @property
    def estimate_s(self) -> float:
        """How long another would wait."""


class RouterMetrics:
    """The router's own figures. One object a process: names are unique in a registry."""

    def __init__(
        self, registry: CollectorRegistry = REGISTRY, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._workers = WorkerSeries(registry, clock)
        self._placements = Counter(
            "baton_router_placements_total",
            "Placements got, by whether a handoff follows: pair or alone",
            ["kind"],
            registry=registry,
        )
        self._alone = Counter(
            "baton_router_placements_alone_total",
            "Those among them that were made from a snapshot, without a scheduler",
            registry=registry,
        )
        self._rejections = Counter(
            "baton_router_rejections_total",
            "Requests refused for want of a place, and retries of others that found none, by why",
            ["code"],
            registry=registry,
        )
        self._retries = self._workers.keep(
            Counter(
                "baton_router_retries_total", "Attempts that failed", ["trouble", "worker"], registry=registry
            )
        )
        self._recomputed = Counter(
            "baton_router_recomputed_total", "Prompts read again, as no KV came", registry=registry
        )
        self._requests = Counter(
            "baton_router_requests_total", "Requests that are over, by how", ["outcome"], registry=registry
        )
        self._refusals = Counter(
            "baton_router_clients_refused_total",
            "At the door: the status they got (401: no key), dropped (no answer), unread (they did not read)",
            ["why"],
            registry=registry,
        )
        self._live = Gauge("baton_router_requests_live", "Requests placed and not over", registry=registry)
        self._journal = Gauge(
            "baton_router_journal_bytes", "Set aside so that requests can go on elsewhere", registry=registry
        )
        self._waiting = Gauge(
            "baton_router_waiting_requests", "Requests that wait for room on the workers", registry=registry
        )
        self._estimate = Gauge(
            "baton_router_waiting_estimate_seconds",
            "How long a request would wait that came now, at the pace of the last ones",
            registry=registry,
        )
        self._waited = Histogram(
            "baton_router_waited_seconds",
            "Waits that ended in a placement; requests that were placed at once are not in it",
            buckets=_SECONDS,
            registry=registry,
        )
        self._place = Histogram(
            "baton_router_place_seconds",
            "Time to first token, part 1: the placement",
            buckets=_SECONDS,
            registry=registry,
        )
        self._queue = self._workers.keep(
            Histogram(
                "baton_router_queue_seconds",
                "Time to first token, part 2: until the prompt's first step",
                ["worker"],
                buckets=_SECONDS,
                registry=registry,
            )
        )
        self._first_token = Histogram(
            "baton_router_first_token_seconds",
            "From the request's arrival to its first token",
            buckets=_SECONDS,
            registry=registry,
        )
        self._handoff = self._workers.keep(
            Histogram(
                "baton_router_handoff_seconds",
                "From the first token until the decode worker has the KV cache",
                ["worker", "transport"],
                buckets=_SECONDS,
                registry=registry,
            )
        )
        self._stages = Histogram(
            "baton_router_handoff_stage_seconds",
            "Stages of the handoff: save at the prefill worker, the others at the decode worker",
            ["stage", "transport"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._bytes = Counter(
            "baton_router_handoff_bytes_total", "KV moved", ["transport"], registry=registry
        )

    def placed(self, placement: Placement, took_s: float) -> None:
        self._placements.labels("pair" if placement.prefill else "alone").inc()
        self._alone.inc(placement.alone)
        self._place.observe(took_s)

    def watch_workers(self, there: Callable[[], Iterable[str]]) -> None:
        """`there` tells the ids of those that are known, from any thread: the series of others end."""
        self._workers.watch(there)

    def watch_journal(self, journal: Journal) -> None:
        self._journal.set_function(lambda: journal.size)

    def watch_waiting(self, waiting: Waiting) -> None:
        self._waiting.set_function(lambda: len(waiting))
        self._estimate.set_function(lambda: waiting.estimate_s)

    def waited(self, seconds: float) -> None:
        self._waited.observe(seconds)

    def rejected(self, code: str) -> None:
        self._rejections.labels(code).inc()

    def refused(self, why: str) -> None:
        """A client, by its connection or for want of a key; a request without a placement is `rejected`."""
        self._refusals.labels(why).inc()

    def began(self) -> None:
        self._live.inc()

    def retried(self, trouble: str, worker_id: str) -> None:
        self._workers.wrote(worker_id)
        self._retries.labels(trouble, worker_id).inc()

    def recomputed(self) -> None:
        self._recomputed.inc()

    def first_token(self, state: RequestState, worker_id: str) -> None:
        """The first one of the request goes out."""
        timings = state.timings
        self._first_token.observe(time.monotonic() - state.arrived)
        if timings.prefill_began:
            self._workers.wrote(worker_id)
            self._queue.labels(worker_id).observe(max(0.0, timings.prefill_began - timings.placed))

    def saved(self, manifest: handoff_pb2.Manifest) -> None:
        # Who pulls it, and how, is not known yet.
        self._stages.labels("save", "none").observe(manifest.save_ms / 1e3)

    def admitted(self, admitted: worker_pb2.Admitted, state: RequestState, worker_id: str) -> None:
        transport = admitted.transport or "none"
        if state.timings.first_token:
            since = time.monotonic() - state.timings.first_token
            self._workers.wrote(worker_id)
            self._handoff.labels(worker_id, transport).observe(since)
        for stage in _STAGES:
            seconds = getattr(admitted, stage) / 1e3
            self._stages.labels(stage.removesuffix("_ms"), transport).observe(seconds)
        self._bytes.labels(transport).inc(admitted.bytes)

    def over(self, state: RequestState) -> None:
        if state.attempts:
            self._live.dec()
        self._requests.labels(state.outcome).inc()
