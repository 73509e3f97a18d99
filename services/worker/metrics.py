"""A worker's figures for Prometheus. Durations in seconds, sizes in bytes, as its conventions want."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from baton.handoff.reports import Loaded, Staged
from baton.protos.worker_pb2 import Failed, Saved
from baton.services.engine.host import EngineStep
from baton.services.errors import StartError

_UNKNOWN = float("nan")
_MS = 1e-3
_STEP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56)
_HANDOFF_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 20.0)


class WorkerMetrics:
    """The figures of one worker, in a registry of their own. Set from the loop's thread."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._num_blocks = 0

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"baton_worker_{name}", text, registry=self.registry)

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"baton_worker_{name}", text, labels, registry=self.registry)

        def histogram(
            name: str, text: str, buckets: tuple[float, ...], labels: tuple[str, ...] = ()
        ) -> Histogram:
            return Histogram(f"baton_worker_{name}", text, labels, buckets=buckets, registry=self.registry)

        self._running = gauge("requests_running", "Requests in the engine's batch.")
        self._waiting = gauge("requests_waiting", "Requests in the engine's queue.")
        self._kv_usage = gauge("kv_cache_usage_ratio", "Blocks of the KV cache in use, 0 to 1.")
        self._pinned = gauge("handoffs_pinned", "Saved handoffs that wait to be pulled.")
        self._pinned_bytes = gauge("handoffs_pinned_bytes", "Bytes of saved handoffs that wait to be pulled.")
        self._tokens = counter("generated_tokens", "Output tokens generated here.")
        self._prefix_queries = counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self._prefix_hits = counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self._refused = counter(
            "requests_refused",
            "Requests not taken: invalid, full, draining, stale (an older epoch).",
            ("why",),
        )
        self._saved = counter("handoffs_saved", "Prompts prefilled whose KV is kept for another worker.")
        self._save_failed = counter("handoffs_save_failed", "Prompts prefilled whose KV could not be kept.")
        self._loaded = counter("handoffs_loaded", "Handoffs pulled and loaded.", ("transport",))
        self._load_failed = counter("handoffs_load_failed", "Handoffs that could not be loaded.", ("error",))
        self._bytes = counter("handoff_bytes", "Bytes pulled.", ("transport",))
        self._step = histogram("engine_step_seconds", "Time of an engine step with work.", _STEP_BUCKETS)
        phases = histogram(
            "engine_step_phase_seconds",
            "Time of the parts of an engine step with work.",
            _STEP_BUCKETS,
            ("phase",),
        )
        self._phases = tuple(phases.labels(phase) for phase in ("draft", "verify", "rest"))
        self._save = histogram(
            "handoff_save_seconds", "Time to copy KV from the engine's cache to staging.", _HANDOFF_BUCKETS
        )
        self._pull = histogram("handoff_move_seconds", "Time to pull a handoff's bytes.", _HANDOFF_BUCKETS)
        self._total = histogram(
            "handoff_total_seconds", "Time from the save's end to the request in the batch.", _HANDOFF_BUCKETS
        )

    @contextlib.contextmanager
    def serving(self, host: str, port: int) -> Iterator[int]:
        """Serve over HTTP inside the block; yield the port. Raises StartError when it is taken."""
        try:
            server, thread = start_http_server(port, addr=host, registry=self.registry)
        except OSError as error:
            raise StartError(
                f"worker.metrics_port: cannot listen on {host}:{port}: {error.strerror}; choose another, or 0"
            ) from None
        try:
            yield int(server.server_port)
        finally:
            server.shutdown()
            server.server_close()
            thread.join(timeout=1)

    def set_blocks(self, num_blocks: int) -> None:
        """Set the KV blocks that requests can have, known once the engine is loaded."""
        self._num_blocks = num_blocks

    def on_step(self, step: EngineStep) -> None:
        """Count a step; called after each that had work or outputs."""
        self._running.set(step.load.running)
        self._waiting.set(step.load.waiting)
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
        self._prefix_queries.inc(step.counts.prefix_queries)
        self._prefix_hits.inc(step.counts.prefix_hits)

    def on_refused(self, code: Failed.Code) -> None:
        """Count a request that was refused."""
        self._refused.labels(Failed.Code.Name(code).removeprefix("CODE_").lower()).inc()

    def on_saved(self, saved: Saved) -> None:
        """Count a prompt that was prefilled for another worker."""
        if saved.HasField("manifest"):
            self._saved.inc()
            self._save.observe(saved.manifest.save_ms * _MS)
        else:
            self._save_failed.inc()

    def on_loaded(self, loaded: Loaded) -> None:
        """Count a handoff that was loaded, or could not be."""
        if loaded.problem is not None:
            self._load_failed.labels(loaded.problem.name).inc()
            return
        transport = loaded.transport or "none"
        self._loaded.labels(transport).inc()
        self._bytes.labels(transport).inc(loaded.bytes)
        self._pull.observe(loaded.costs.move_ms * _MS)
        self._total.observe(loaded.total_ms * _MS)

    def ask_staged(self, ask: Callable[[], Staged | None]) -> None:
        """Call `ask` at each scrape, in its thread, for what waits to be pulled; None: not known."""
        self._pinned.set_function(lambda: staged.handoffs if (staged := ask()) else _UNKNOWN)
        self._pinned_bytes.set_function(lambda: staged.bytes if (staged := ask()) else _UNKNOWN)
