"""The router's own metrics, served beside vLLM's in the same /metrics.

Each is observed per request, attempt or placement, never per token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sized
from typing import Protocol

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from baton.protos import handoff_pb2, worker_pb2
from baton.scheduler.client import Placement
from baton.services.router.journal import Journal
from baton.services.router.living_series import LivingSeries
from baton.services.router.state import RequestState
from baton.services.router.tenant_metrics import TenantMetrics

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
_STAGES = ("wait_ms", "move_ms", "check_ms", "load_ms", "total_ms")


class Waiting(Sized, Protocol):
    """The queue of waiting requests; its length is their number."""

    @property
    def estimate_s(self) -> float:
        """The time that another request would wait, seconds."""


class RouterMetrics:
    """The router's own metrics. One object per process: names are unique in a registry."""

    def __init__(
        self, registry: CollectorRegistry = REGISTRY, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._workers = LivingSeries("worker", registry, clock)
        self.tenants = TenantMetrics(registry, clock)
        self._placements = Counter(
            "baton_router_placements_total",
            "Placements, by kind: pair (a handoff follows) or alone (one worker prefills and decodes)",
            ["kind"],
            registry=registry,
        )
        self._without_scheduler = Counter(
            "baton_router_placements_without_scheduler_total",
            "Placements made by the router itself from its last snapshot, while no scheduler answered",
            registry=registry,
        )
        self._rejections = Counter(
            "baton_router_rejections_total",
            "Requests and retries that got no placement, by reason",
            ["code"],
            registry=registry,
        )
        self._retries = self._workers.keep(
            Counter(
                "baton_router_retries_total",
                "Attempts that failed, by kind of failure",
                ["trouble", "worker"],
                registry=registry,
            )
        )
        self._recomputed = Counter(
            "baton_router_recomputed_prompts_total",
            "Prompts recomputed on the decode worker because no KV cache arrived",
            registry=registry,
        )
        self._requests = Counter(
            "baton_router_requests_total", "Requests completed, by outcome", ["outcome"], registry=registry
        )
        self._refusals = Counter(
            "baton_router_clients_refused_total",
            "Clients refused, by HTTP status (401: no valid API key), dropped (too many connections, "
            "no answer sent) or unread (the client did not read its answer)",
            ["reason"],
            registry=registry,
        )
        self._live = Gauge(
            "baton_router_live_requests", "Requests placed and not yet completed", registry=registry
        )
        self._journal = Gauge(
            "baton_router_journal_bytes",
            "Memory reserved for requests, so that they can be resumed on other workers",
            registry=registry,
        )
        self._waiting = Gauge(
            "baton_router_waiting_requests", "Requests waiting for room on the workers", registry=registry
        )
        self._estimate = Gauge(
            "baton_router_waiting_estimate_seconds",
            "Expected wait of a request that arrives now, at the pace of the last placements",
            registry=registry,
        )
        self._wait = Histogram(
            "baton_router_wait_seconds",
            "Wait for room on the workers, of requests that were not placed at once",
            buckets=_SECONDS,
            registry=registry,
        )
        self._place = Histogram(
            "baton_router_placement_seconds",
            "Duration of a placement, the first part of the time to first token",
            buckets=_SECONDS,
            registry=registry,
        )
        self._queue = self._workers.keep(
            Histogram(
                "baton_router_queue_seconds",
                "From the placement to the prefill's first step, the second part of the time to first token",
                ["worker"],
                buckets=_SECONDS,
                registry=registry,
            )
        )
        self._first_token = Histogram(
            "baton_router_time_to_first_token_seconds",
            "From the request's arrival to its first token",
            buckets=_SECONDS,
            registry=registry,
        )
        self._handoff = self._workers.keep(
            Histogram(
                "baton_router_handoff_seconds",
                "From the first token until the KV cache is loaded on the decode worker",
                ["worker", "transport"],
                buckets=_SECONDS,
                registry=registry,
            )
        )
        self._stages = Histogram(
            "baton_router_handoff_stage_seconds",
            "Stages of the handoff: save on the prefill worker, the others on the decode worker",
            ["stage", "transport"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._bytes = Counter(
            "baton_router_handoff_bytes_total",
            "KV cache handed over, in bytes",
            ["transport"],
            registry=registry,
        )

    def placed(self, placement: Placement, took_s: float) -> None:
        """Count a placement."""
        self._placements.labels("pair" if placement.prefill else "alone").inc()
        self._without_scheduler.inc(placement.alone)
        self._place.observe(took_s)

    def watch_workers(self, known: Callable[[], Iterable[str]]) -> None:
        """Set the function that returns the ids of known workers; the series of others end. Any thread."""
        self._workers.watch(known)

    def watch_journal(self, journal: Journal) -> None:
        """Show the size of this journal."""
        self._journal.set_function(lambda: journal.size)

    def watch_waiting(self, waiting: Waiting) -> None:
        """Show the length and the estimate of this queue."""
        self._waiting.set_function(lambda: len(waiting))
        self._estimate.set_function(lambda: waiting.estimate_s)

    def waited(self, seconds: float) -> None:
        """Count a request that was placed after a wait."""
        self._wait.observe(seconds)

    def rejected(self, code: str) -> None:
        """Count a request or a retry that got no placement."""
        self._rejections.labels(code).inc()

    def refused(self, reason: str) -> None:
        """Count a client refused by the HTTP layer, before its request could be placed."""
        self._refusals.labels(reason).inc()

    def began(self) -> None:
        """Count a request that has its first placement."""
        self._live.inc()

    def retried(self, trouble: str, worker_id: str) -> None:
        """Count an attempt that failed."""
        self._workers.counted(worker_id)
        self._retries.labels(trouble, worker_id).inc()

    def recomputed(self) -> None:
        """Count a prompt that is recomputed on the decode worker."""
        self._recomputed.inc()

    def first_token(self, state: RequestState, worker_id: str) -> None:
        """Count the request's first token, from the worker that prefilled it."""
        timings = state.timings
        self._first_token.observe(time.monotonic() - state.arrived)
        if timings.prefill_began:
            self._workers.counted(worker_id)
            self._queue.labels(worker_id).observe(max(0.0, timings.prefill_began - timings.placed))

    def saved(self, manifest: handoff_pb2.Manifest) -> None:
        """Count a KV cache that a prefill worker has saved."""
        # The transport is not known yet.
        self._stages.labels("save", "none").observe(manifest.save_ms / 1e3)

    def admitted(self, admitted: worker_pb2.Admitted, state: RequestState, worker_id: str) -> None:
        """Count a KV cache that the decode worker has loaded."""
        transport = admitted.transport or "none"
        if state.timings.first_token:
            since = time.monotonic() - state.timings.first_token
            self._workers.counted(worker_id)
            self._handoff.labels(worker_id, transport).observe(since)
        for stage in _STAGES:
            seconds = getattr(admitted, stage) / 1e3
            self._stages.labels(stage.removesuffix("_ms"), transport).observe(seconds)
        self._bytes.labels(transport).inc(admitted.bytes)

    def over(self, state: RequestState) -> None:
        """Count a request that has its outcome."""
        if state.attempts:
            self._live.dec()
        self._requests.labels(state.outcome).inc()
