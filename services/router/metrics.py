"""The router's own metrics, served beside vLLM's in the same /metrics.

Each is observed per request, attempt or placement, never per token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sized
from typing import Protocol

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from baton.metrics import SECONDS, ProcessFigures
from baton.protos import worker_pb2
from baton.scheduler.client import Placement
from baton.services.router.class_metrics import ClassMetrics
from baton.services.router.errors import NotAdmitted, RequestFailed
from baton.services.router.journal import Journal
from baton.services.router.living_series import LivingSeries
from baton.services.router.state import RequestState
from baton.services.router.tenant_metrics import TenantMetrics
from baton.services.router.timeline import TO_FIRST_TOKEN, seconds_by_stage, to_first_token

_GAP_PARTS = ("engine", "wire", "router", "client")
_ATTEMPTS = (1.0, 2.0, 3.0, 5.0, 10.0)
_OUTCOMES = ("stop", "length", "abort", "error", "refused")
_PREFIX_PULLS = ("loaded", "not_cached", "refused", "not_kept", "late", "lost", "avoided", "failed")
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
        self.classes = ClassMetrics(registry)
        ProcessFigures(registry)
        self._placements = Counter(
            "baton_router_placements_total",
            "Placements, by kind: pair (a handoff follows) or alone (one worker prefills and decodes)",
            ["kind"],
            registry=registry,
        )
        self._moved = Counter(
            "baton_router_placements_moved_total",
            "Placements by another of several schedulers than the one that the router belongs to",
            registry=registry,
        )
        self._without_scheduler = Counter(
            "baton_router_placements_without_scheduler_total",
            "Placements made by the router itself from its last snapshot: no scheduler answered, or it did "
            "not know the workers",
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
        self._suspects = Counter(
            "baton_router_suspects_total",
            "Requests tried alone: passed, convicted, or refused at the door later",
            ["end"],
            registry=registry,
        )
        self._recomputed = Counter(
            "baton_router_recomputed_prompts_total",
            "Prompts recomputed on the decode worker because no KV cache arrived",
            registry=registry,
        )
        self._pairs_avoided = Counter(
            "baton_router_pairs_avoided_total",
            "Placements changed before use, as their two workers do not reach each other",
            registry=registry,
        )
        self._requests = Counter(
            "baton_router_requests_total", "Requests completed, by outcome", ["outcome"], registry=registry
        )
        for outcome in _OUTCOMES:
            self._requests.labels(outcome)  # from 0 on: Prometheus sees no increase from nothing to 1
        self._attempts = Histogram(
            "baton_router_request_attempts",
            "Placements that a completed request took: 1, and one more for each attempt that failed",
            buckets=_ATTEMPTS,
            registry=registry,
        )
        self._scheduler_up = Gauge(
            "baton_router_scheduler_up",
            "1 while a scheduler answers this router; of several models one of each",
            registry=registry,
        )
        self._scheduler_losses = Counter(
            "baton_router_scheduler_losses_total",
            "Times that no scheduler answered any more",
            registry=registry,
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
        self._queues: list[Waiting] = []
        self._ready = Gauge(
            "baton_router_ready_workers",
            "Workers of a model that are ready, as this router last heard",
            ["model"],
            registry=registry,
        )
        self._estimate = Gauge(
            "baton_router_waiting_estimate_seconds",
            "Expected wait of a request that arrives now, at the pace of the last placements",
            registry=registry,
        )
        self._wait = Histogram(
            "baton_router_wait_seconds",
            "Wait for room on the workers, of requests that were not placed at once",
            buckets=SECONDS,
            registry=registry,
        )
        self._place = Histogram(
            "baton_router_placement_seconds",
            "Duration of a placement, the first part of the time to first token",
            buckets=SECONDS,
            registry=registry,
        )
        self._queue = self._workers.keep(
            Histogram(
                "baton_router_queue_seconds",
                "From the placement to the prefill's first step, the second part of the time to first token",
                ["worker"],
                buckets=SECONDS,
                registry=registry,
            )
        )
        self._first_token = Histogram(
            "baton_router_time_to_first_token_seconds",
            "From the request's arrival to its first token",
            buckets=SECONDS,
            registry=registry,
        )
        parts = Histogram(
            "baton_router_ttft_stage_seconds",
            "Stages of the time to first token; their sum is that time",
            ["stage"],
            buckets=SECONDS,
            registry=registry,
        )
        self._ttft = {stage: parts.labels(stage) for stage in TO_FIRST_TOKEN}
        gaps = Histogram(
            "baton_router_itl_stage_seconds",
            "A token's way, of a sample of tokens: its engine since the request's last output, wire, router, "
            "and its client's socket",
            ["stage"],
            buckets=SECONDS,
            registry=registry,
        )
        self._gap = {stage: gaps.labels(stage) for stage in _GAP_PARTS}
        self._handoff = self._workers.keep(
            Histogram(
                "baton_router_handoff_seconds",
                "From the first token until the KV cache is loaded on the decode worker",
                ["worker", "transport"],
                buckets=SECONDS,
                registry=registry,
            )
        )
        self._stages = Histogram(
            "baton_router_handoff_stage_seconds",
            "Stages of the handoff: save and sample, the rest of that step, on the prefill worker; the "
            "others on the decode worker",
            ["stage", "transport"],
            buckets=SECONDS,
            registry=registry,
        )
        self._bytes = Counter(
            "baton_router_handoff_bytes_total",
            "KV cache handed over, in bytes",
            ["transport"],
            registry=registry,
        )
        self._early_bytes = Counter(
            "baton_router_handoff_early_bytes_total",
            "KV cache handed over while its prompt was still prefilled, in bytes",
            ["transport"],
            registry=registry,
        )

        self._prefix_pulls = Counter(
            "baton_router_prefix_pulls_total",
            "Beginnings of prompts asked of a worker that holds them, by outcome: loaded, or why the prefill "
            "worker computed them (not_cached: they were evicted; failed: it could not load them)",
            ["outcome"],
            registry=registry,
        )
        for outcome in _PREFIX_PULLS:
            self._prefix_pulls.labels(outcome)
        self._prefix_tokens = Counter(
            "baton_router_prefix_pulled_tokens_total",
            "Prompt tokens that a prefill worker did not compute, as another worker held them",
            registry=registry,
        )

    def placed(self, placement: Placement, took_s: float) -> None:
        """Count a placement."""
        self._placements.labels("pair" if placement.prefill else "alone").inc()
        self._moved.inc(placement.moved)
        self._without_scheduler.inc(placement.alone)
        self._place.observe(took_s)

    def watch_workers(self, known: Callable[[], Iterable[str]]) -> None:
        """Set the function that returns the ids of known workers; the series of others end. Any thread."""
        self._workers.watch(known)

    def watch_scheduler(self, answers: Callable[[], bool]) -> None:
        """Show whether a scheduler answers."""
        self._scheduler_up.set_function(answers)

    def scheduler_lost(self) -> None:
        """Count that no scheduler answers any more."""
        self._scheduler_losses.inc()

    def watch_journal(self, journal: Journal) -> None:
        """Show the size of this journal."""
        self._journal.set_function(lambda: journal.size)

    def watch_waiting(self, waiting: Waiting) -> None:
        """Show the length and the estimate of this queue; of several their sum, and the longest one's."""
        self._queues.append(waiting)
        self._waiting.set_function(lambda: sum(len(one) for one in self._queues))
        self._estimate.set_function(lambda: max(one.estimate_s for one in self._queues))

    def watch_model(self, model: str, ready: Callable[[], int]) -> None:
        """Show how many workers of a model are ready."""
        self._ready.labels(model).set_function(ready)

    def waited(self, seconds: float) -> None:
        """Count a request that was placed after a wait."""
        self._wait.observe(seconds)

    def rejected(self, code: str) -> None:
        """Count a request or a retry that got no placement."""
        self._rejections.labels(code).inc()

    def refused(self, reason: str) -> None:
        """Count a client refused by the HTTP layer, before its request could be placed."""
        self._refusals.labels(reason).inc()

    def turned_away(self, error: RequestFailed) -> None:
        """Count a request for which this router has no room at all: it began no sequence."""
        self._requests.labels("refused").inc()
        if isinstance(error, NotAdmitted):
            self.rejected(error.why)

    def began(self) -> None:
        """Count a request that has its first placement."""
        self._live.inc()

    def retried(self, trouble: str, worker_id: str) -> None:
        """Count an attempt that failed."""
        self._workers.counted(worker_id)
        self._retries.labels(trouble, worker_id).inc()

    def pair_avoided(self) -> None:
        """Count a placement that is changed, as its two workers do not reach each other."""
        self._pairs_avoided.inc()

    def suspect(self, end: str) -> None:
        """Count a suspect: it passed its trial, was convicted, or repeats a convicted request."""
        self._suspects.labels(end).inc()

    def recomputed(self) -> None:
        """Count a prompt that is recomputed on the decode worker."""
        self._recomputed.inc()

    def first_token(self, state: RequestState, worker_id: str) -> None:
        """Count the request's first token, from the worker that prefilled it."""
        timings = state.timings
        exemplar = _exemplar(state)
        self._first_token.observe(state.first_token - state.http.arrived, exemplar)
        for stage, seconds in seconds_by_stage(to_first_token(state)).items():
            self._ttft[stage].observe(seconds, exemplar)
        if timings.prefill_began:
            self._workers.counted(worker_id)
            self._queue.labels(worker_id).observe(max(0.0, timings.prefill_began - timings.placed))

    def delivered(self, state: RequestState) -> None:
        """Count the last stage of a stream's first token, to its client's socket."""
        self._ttft["deliver"].observe(state.http.first_byte - state.first_token, _exemplar(state))

    def gap(self, stage: str, seconds: float) -> None:
        """Count one part of a sample of the time between two tokens."""
        self._gap[stage].observe(max(0.0, seconds))

    def saved(self, state: RequestState) -> None:
        """Count a KV cache that a prefill worker has saved."""
        # The transport is not known yet.
        self._stages.labels("save", "none").observe(state.timings.save_ms / 1e3)

    def admitted(self, admitted: worker_pb2.Admitted, state: RequestState, worker_id: str) -> None:
        """Count a KV cache that the decode worker has loaded."""
        transport = admitted.transport or "none"
        if state.timings.first_token:
            since = max(0.0, state.timings.admitted - state.timings.first_token)
            self._workers.counted(worker_id)
            self._handoff.labels(worker_id, transport).observe(since)
        for stage in _STAGES:
            seconds = getattr(admitted, stage) / 1e3
            self._stages.labels(stage.removesuffix("_ms"), transport).observe(seconds)
        if state.timings.saved:  # before the step that saved it had its token
            sampled = state.timings.prefill_ended - state.timings.saved
            self._stages.labels("sample", transport).observe(max(0.0, sampled))
        self._bytes.labels(transport).inc(admitted.bytes)
        self._early_bytes.labels(transport).inc(admitted.early_bytes)

    def prefix_pull(self, outcome: str, tokens: int = 0) -> None:
        """Count a prompt's beginning that was asked of another worker, and the tokens that came."""
        self._prefix_pulls.labels(outcome).inc()
        self._prefix_tokens.inc(tokens)

    def over(self, state: RequestState) -> None:
        """Count a request that has its outcome."""
        if state.attempts:
            self._live.dec()
            self._attempts.observe(state.attempts)
        self._requests.labels(state.outcome).inc()
        self.classes.over(state)


def _exemplar(state: RequestState) -> dict[str, str] | None:
    """Return a request's trace for those who read OpenMetrics, if there will be one to look at."""
    trace = state.trace
    return {"trace_id": trace.trace_id} if trace.sampled else None
