"""Export a worker's metrics to Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.registry import Collector

from baton.handoff.reports import Loaded, Problem, Staged
from baton.metrics import Metrics, counter, gauge, histogram, registry
from baton.protos.scheduler_pb2 import Embeddings
from baton.protos.worker_pb2 import Failed, Saved

if TYPE_CHECKING:  # metrics are served before vLLM, which takes seconds to import
    from baton.services.engine.step import EngineStep

_UNKNOWN = float("nan")
_MS = 1e-3


class WorkerMetrics(Metrics):
    """The metrics of one worker, set on the event loop's thread."""

    prefix = "baton_worker_"

    _requests_running = gauge("Requests in the engine's batch")
    _requests_waiting = gauge("Requests in the engine's queue")
    _kv_cache_usage_ratio = gauge("KV cache in use, 0 to 1")
    _handoffs_pinned = gauge("Saved handoffs that have not been pulled")
    _handoffs_pinned_bytes = gauge("Bytes of saved handoffs that have not been pulled")
    _handoffs_pinned_overdue_seconds = gauge("Age of the oldest saved handoff beyond its lease")
    clock_offset_seconds = gauge("The scheduler's clock minus this machine's")
    _generated_tokens = counter("Output tokens generated here")
    _prefix_cache_queries = counter("Prompt tokens looked up in the prefix cache")
    _prefix_cache_hits = counter("Prompt tokens found in the prefix cache")
    _requests_held_back = counter("Requests left out of a step in favour of another class, once per step")
    _requests_preempted_for_classes = counter("Requests preempted for another class")
    _requests_refused = counter(
        "Requests refused: invalid, full, staging (no room for KV), draining, stale (older epoch)", "why"
    )
    _handoffs_saved = counter("Prompts whose KV was saved for another worker")
    _handoffs_save_failed = counter("Prompts whose KV could not be saved")
    _handoffs_loaded = counter("Handoffs pulled and loaded", "transport")
    _handoffs_load_failed = counter(
        "Handoffs not loaded, by error; NothingSaved: the request ended at the prefill worker", "error"
    )
    _handoff_bytes = counter("Bytes pulled", "transport")
    _embeddings_images = gauge("Images whose embeddings this encode worker keeps")
    _embeddings_bytes = gauge("Bytes of the embeddings that this encode worker keeps")
    _embeddings_computed = counter("Images computed here for other workers")
    _embeddings_found = counter("Images whose embeddings were still here when they were asked for")
    _embeddings_loaded = counter("Images whose embeddings came from an encode worker", "transport")
    _embeddings_loaded_bytes = counter("Bytes of embeddings that came from an encode worker", "transport")
    _embeddings_load_failed = counter("Images whose embeddings did not arrive, by error", "error")
    _dummy_steps = counter("Steps without requests, computed because another worker of the gang had some")
    _engine_steps_failed = counter("Engine steps that failed without ending the engine")
    _engine_step_seconds = histogram("Time of an engine step")
    _engine_step_phase_seconds = histogram("Parts of an engine step: draft, verify, rest", "phase")
    _handoff_save_seconds = histogram("Time to copy KV to staging")
    _handoff_move_seconds = histogram("Time to pull a handoff's bytes")
    _handoff_total_seconds = histogram("From the end of the save to the request in the batch")

    def __init__(self) -> None:
        self.registry = registry()
        self._before = _BeforeScrape(self.registry)  # first: a scrape follows the order of registration
        super().__init__(self.registry)
        self._num_blocks = 0
        self._kept = Embeddings()
        phases = ("draft", "verify", "rest")
        self._phases = tuple(self._engine_step_phase_seconds.labels(phase) for phase in phases)

    def set_blocks(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks

    def on_step(self, step: EngineStep) -> None:
        self._requests_running.set(step.load.running)
        self._requests_waiting.set(step.load.waiting)
        if step.failed:
            self._engine_steps_failed.inc()
        if self._num_blocks:
            self._kv_cache_usage_ratio.set(1 - step.load.free_blocks / self._num_blocks)
        if step.executed:
            self._engine_step_seconds.observe(step.seconds)
            draft_s, verify_s = step.times.draft_s, step.times.verify_s
            for phase, seconds in zip(
                self._phases, (draft_s, verify_s, max(0.0, step.seconds - draft_s - verify_s)), strict=True
            ):
                phase.observe(seconds)
        tokens = sum(
            len(output.new_token_ids) for outputs in step.outputs.values() for output in outputs.outputs
        )
        self._generated_tokens.inc(tokens)
        self._requests_held_back.inc(step.yielded.held)
        self._requests_preempted_for_classes.inc(step.yielded.preempted)
        self._prefix_cache_queries.inc(step.counts.prefix_queries)
        self._prefix_cache_hits.inc(step.counts.prefix_hits)

    def on_refused(self, code: Failed.Code) -> None:
        self._requests_refused.labels(Failed.Code.Name(code).removeprefix("CODE_").lower()).inc()

    def on_saved(self, saved: Saved) -> None:
        if saved.problem:
            self._handoffs_save_failed.inc()
        else:
            self._handoffs_saved.inc()
            self._handoff_save_seconds.observe(saved.save_ms * _MS)

    def on_not_loaded(self, problem: Problem) -> None:
        self._handoffs_load_failed.labels(problem.name).inc()

    def on_loaded(self, loaded: Loaded) -> None:
        transport = loaded.transport or "none"
        self._handoffs_loaded.labels(transport).inc()
        self._handoff_bytes.labels(transport).inc(loaded.bytes)
        self._handoff_move_seconds.observe(loaded.costs.move_ms * _MS)
        self._handoff_total_seconds.observe(loaded.total_ms * _MS)

    def on_kept(self, kept: Embeddings) -> None:
        """Show what an encode worker keeps; called with each heartbeat."""
        before, self._kept = self._kept, kept
        self._embeddings_images.set(kept.images)
        self._embeddings_bytes.set(kept.bytes)
        self._embeddings_computed.inc(kept.computed - before.computed)
        self._embeddings_found.inc(kept.found - before.found)

    def on_embeddings(self, transport: str, size: int) -> None:
        self._embeddings_loaded.labels(transport).inc()
        self._embeddings_loaded_bytes.labels(transport).inc(size)

    def on_no_embeddings(self, error: str) -> None:
        self._embeddings_load_failed.labels(error).inc()

    def ask(self, staged_now: Callable[[], Staged | None], dummy_steps: Callable[[], int]) -> None:
        """Ask once per scrape, on its thread, for saved KV (None: unknown) and dummy steps so far."""
        counted = 0

        def look() -> None:
            nonlocal counted
            dummies = dummy_steps()
            self._dummy_steps.inc(max(0, dummies - counted))  # scrapes may be concurrent
            counted = dummies
            staged = staged_now()
            self._handoffs_pinned.set(staged.handoffs if staged else _UNKNOWN)
            self._handoffs_pinned_bytes.set(staged.bytes if staged else _UNKNOWN)
            self._handoffs_pinned_overdue_seconds.set(staged.overdue_s if staged else _UNKNOWN)

        self._before.look = look


class _BeforeScrape(Collector):
    """A collector without metrics, which updates other metrics at the beginning of each scrape."""

    def __init__(self, before: CollectorRegistry) -> None:
        self.look: Callable[[], None] = lambda: None
        before.register(self)

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        self.look()
        return ()
