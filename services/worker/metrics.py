"""A worker's figures for Prometheus. Durations in seconds, sizes in bytes, as its conventions want."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.registry import Collector

from baton import metrics
from baton.handoff.reports import Loaded, Problem, Staged
from baton.metrics import SECONDS
from baton.protos.worker_pb2 import Failed, Saved

if TYPE_CHECKING:  # vLLM takes seconds to import, and metrics are served meanwhile
    from baton.services.engine.host import EngineStep

_UNKNOWN = float("nan")
_MS = 1e-3


class WorkerMetrics:
    """The figures of one worker, in a registry of their own. Set from the loop's thread."""

    def __init__(self) -> None:
        self.registry = metrics.registry()
        self._num_blocks = 0

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"baton_worker_{name}", text, registry=self.registry)

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"baton_worker_{name}", text, labels, registry=self.registry)

        def histogram(name: str, text: str, labels: tuple[str, ...] = ()) -> Histogram:
            return Histogram(f"baton_worker_{name}", text, labels, buckets=SECONDS, registry=self.registry)

        self._running = gauge("requests_running", "Requests in the engine's batch.")
        self._waiting = gauge("requests_waiting", "Requests in the engine's queue.")
        self._kv_usage = gauge("kv_cache_usage_ratio", "Blocks of the KV cache in use, 0 to 1.")
        self._before = _BeforeScrape(self.registry)  # a scrape goes through a registry in order
        self._pinned = gauge("handoffs_pinned", "Saved handoffs that wait to be pulled.")
        self._pinned_bytes = gauge("handoffs_pinned_bytes", "Bytes of saved handoffs that wait to be pulled.")
        self._overdue = gauge(
            "handoffs_pinned_overdue_seconds",
            "Age of the oldest saved handoff beyond its lease, 0 where none is older.",
        )
        self.clock_offset = gauge(
            "clock_offset_seconds", "The scheduler's clock less this machine's, as of the last heartbeat."
        )
        self._tokens = counter("generated_tokens", "Output tokens generated here.")
        self._prefix_queries = counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self._prefix_hits = counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self._held = counter(
            "requests_held_back", "Times that a step left a request out, as it gave way to another class."
        )
        self._preempted = counter(
            "requests_preempted_for_classes",
            "Times that a request lost slot and KV to one of another class; it went on later.",
        )
        self._refused = counter(
            "requests_refused",
            "Requests not taken: invalid, full, staging (stays full), draining, stale (an older epoch).",
            ("why",),
        )
        self._saved = counter("handoffs_saved", "Prompts prefilled whose KV is kept for another worker.")
        self._save_failed = counter("handoffs_save_failed", "Prompts prefilled whose KV could not be kept.")
        self._loaded = counter("handoffs_loaded", "Handoffs pulled and loaded.", ("transport",))
        self._load_failed = counter(
            "handoffs_load_failed",
            "Handoffs that could not be loaded, by the name of the error; NothingSaved: their prompts ended "
            "with their first token, or were aborted.",
            ("error",),
        )
        self._bytes = counter("handoff_bytes", "Bytes pulled.", ("transport",))
        self._steps_failed = counter(
            "engine_steps_failed",
            "Steps that raised, after which the engine went on without the steps' requests.",
        )
        self._step = histogram("engine_step_seconds", "Time of an engine step with work.")
        phases = histogram(
            "engine_step_phase_seconds", "Time of the parts of an engine step with work.", ("phase",)
        )
        self._phases = tuple(phases.labels(phase) for phase in ("draft", "verify", "rest"))
        self._save = histogram("handoff_save_seconds", "Time to copy KV from the engine's cache to staging.")
        self._pull = histogram("handoff_move_seconds", "Time to pull a handoff's bytes.")
        self._total = histogram(
            "handoff_total_seconds", "Time from the save's end to the request in the batch."
        )

    def set_blocks(self, num_blocks: int) -> None:
        """Set the KV blocks that requests can have, known once the engine is loaded."""
        self._num_blocks = num_blocks

    def on_step(self, step: EngineStep) -> None:
        """Count a step; called after each that had work or outputs."""
        self._running.set(step.load.running)
        self._waiting.set(step.load.waiting)
        if step.failed:
            self._steps_failed.inc()
        if self._num_blocks:
            self._kv_usage.set(1 - step.load.free_blocks / self._num_blocks)
        if step.executed:
            self._step.observe(step.seconds)
            draft_s, verify_s = step.times.draft_s, step.times.verify_s
            for phase, seconds in zip(
                self._phases, (draft_s, verify_s, max(0.0, step.seconds - draft_s - verify_s)), strict=True
            ):
                phase.observe(seconds)
        tokens = sum(
            len(output.new_token_ids) for outputs in step.outputs.values() for output in outputs.outputs
        )
        self._tokens.inc(tokens)
        self._held.inc(step.yielded.held)
        self._preempted.inc(step.yielded.preempted)
        self._prefix_queries.inc(step.counts.prefix_queries)
        self._prefix_hits.inc(step.counts.prefix_hits)

    def on_refused(self, code: Failed.Code) -> None:
        """Count a request that was refused."""
        self._refused.labels(Failed.Code.Name(code).removeprefix("CODE_").lower()).inc()

    def on_saved(self, saved: Saved) -> None:
        """Count a prompt that was prefilled for another worker."""
        if saved.problem:
            self._save_failed.inc()
        else:
            self._saved.inc()
            self._save.observe(saved.save_ms * _MS)

    def on_not_loaded(self, problem: Problem) -> None:
        """Count a handoff that could not be loaded."""
        self._load_failed.labels(problem.name).inc()

    def on_loaded(self, loaded: Loaded) -> None:
        """Count a handoff that was loaded."""
        transport = loaded.transport or "none"
        self._loaded.labels(transport).inc()
        self._bytes.labels(transport).inc(loaded.bytes)
        self._pull.observe(loaded.costs.move_ms * _MS)
        self._total.observe(loaded.total_ms * _MS)

    def ask_staged(self, ask: Callable[[], Staged | None]) -> None:
        """Call `ask` once in each scrape, in its thread, for what waits to be pulled; None: not known."""

        def look() -> None:
            staged = ask()
            self._pinned.set(staged.handoffs if staged else _UNKNOWN)
            self._pinned_bytes.set(staged.bytes if staged else _UNKNOWN)
            self._overdue.set(staged.overdue_s if staged else _UNKNOWN)

        self._before.look = look


class _BeforeScrape(Collector):
    """Sets other metrics at the beginning of each scrape; has none of its own."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Come before all that is registered after this."""
        self.look: Callable[[], None] = lambda: None
        registry.register(self)

    def describe(self) -> Iterable[Metric]:
        """Return nothing."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Set the others. Return nothing."""
        self.look()
        return ()
