"""The router's own metrics, in the same /metrics as vLLM's.

They are updated per request, attempt or placement, never per token.
"""

from __future__ import annotations

import math
import time
from collections import Counter as Counts
from collections.abc import Callable, Iterable, Sized

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.registry import Collector

from baton.metrics import Metrics, ProcessFigures, counter, gauge, histogram
from baton.protos import worker_pb2
from baton.scheduler.client import Placement
from baton.services.classes import ServiceClass
from baton.services.router.errors import NotAdmitted, RequestFailed
from baton.services.router.state import RequestState
from baton.services.router.timeline import TO_FIRST_TOKEN, seconds_by_stage, to_first_token

GONE_S = 300.0  # long enough to scrape the last counts a few times
MAX_TENANTS = 1_000  # tenants that have series of their own, about ten each
OTHERS = "(others)"  # the label of all further tenants; no tenant's name has such characters
_GAP_PARTS = ("engine", "wire", "router", "client")
_OUTCOMES = ("stop", "length", "abort", "error", "refused")
_IMAGES = ("accepted", "refused", "late", "left")
_COMPUTED = ("encode", "held", "prompt")
_PREFIX_PULLS = ("loaded", "not_cached", "refused", "not_kept", "late", "lost", "avoided", "failed")
_STAGES = ("wait_ms", "move_ms", "check_ms", "load_ms", "total_ms")
_PLACED = ("pair", "alone")  # alone: on one worker, whoever chose it and whatever else it runs
_MET = ("yes", "no")


class RouterMetrics(Metrics):
    """The router's own metrics. One object per registry."""

    prefix = "baton_router_"

    _placements = counter("Placements: pair (with a handoff) or alone (one worker)", "kind")
    _placements_moved = counter("Placements by a scheduler other than the router's own")
    _placements_without_scheduler = counter("Placements by the router itself, from its snapshot")
    rejections = counter("Requests and retries without a placement, by reason", "code")
    _retries = counter("Failed attempts, by kind", "trouble", "worker")
    suspects = counter("Requests tried alone: passed, convicted, or refused when repeated", "end")
    recomputed_prompts = counter("Prompts recomputed on the decode worker because KV was missing")
    pairs_avoided = counter("Placements changed because the two workers cannot reach each other")
    _requests = counter("Requests completed, by outcome", "outcome")
    _request_attempts = histogram(
        "Placements that a completed request took", buckets=(1.0, 2.0, 3.0, 5.0, 10.0)
    )
    scheduler_up = gauge("1 while a scheduler answers (for each model, if there are several)")
    scheduler_losses = counter("Times that all schedulers stopped answering")
    _clients_refused = counter(
        "Clients refused (by HTTP status), dropped (connection limit) or unread (slow to read)", "reason"
    )
    _images = counter(
        "Images in requests: accepted, refused, late (no room, no time), left (client)", "outcome"
    )
    _image_bytes = counter(
        "Bytes of prepared images sent to workers, by their role when the stream began", "role"
    )
    image_pixels = gauge("Pixels of decoded images that vLLM has not prepared yet")
    _images_seconds = histogram("Time to fetch and decode a request's images, including waits")
    _images_computed = counter(
        "Images computed for prompts: encode (on an encode worker), held (it had them), prompt (with it)",
        "where",
    )
    encode_seconds = histogram("From an image's placement on an encode worker to its embeddings")
    live_requests = gauge("Requests placed and not yet completed")
    journal_bytes = gauge("Memory reserved for resuming requests")
    _waiting_requests = gauge("Requests waiting for room on workers")
    ready_workers = gauge("Ready workers of a model", "model")
    _waiting_estimate_seconds = gauge("Expected wait of a request that arrives now")
    wait_seconds = histogram("Wait of requests that were not placed at once")
    _placement_seconds = histogram("Duration of a placement")
    _queue_seconds = histogram("From the placement to the prefill's first step", "worker")
    _time_to_first_token_seconds = histogram("From the request's arrival to its first token")
    _ttft_stage_seconds = histogram("Stages that add up to the time to first token", "stage")
    _itl_stage_seconds = histogram(
        "Sampled gaps between two tokens, by part: engine, wire, router, client", "stage"
    )
    _handoff_seconds = histogram(
        "From the first token to loaded KV on the decode worker", "worker", "transport"
    )
    _handoff_stage_seconds = histogram(
        "Stages of the handoff: save, sample (prefill worker), then the decode worker's", "stage", "transport"
    )
    _handoff_bytes = counter("Bytes of KV handed over", "transport")
    _handoff_early_bytes = counter(
        "Bytes handed over while the prompt was still being prefilled", "transport"
    )
    _prefix_pulls = counter("Prefixes of prompts pulled from another worker: loaded, or why not", "outcome")
    _prefix_pulled_tokens = counter("Prompt tokens pulled instead of computed")

    def __init__(
        self, registry: CollectorRegistry = REGISTRY, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._workers = LivingSeries("worker", registry, clock)  # before the metrics: scraped in this order
        super().__init__(registry)
        self._workers.keep(self.labelled("worker"))
        self.tenants = TenantMetrics(registry, clock)
        self.classes = ClassMetrics(registry)
        ProcessFigures(registry)
        self._queues: list[tuple[Sized, Callable[[], float]]] = []
        self._ttft = {stage: self._ttft_stage_seconds.labels(stage) for stage in TO_FIRST_TOKEN}
        self._gap = {stage: self._itl_stage_seconds.labels(stage) for stage in _GAP_PARTS}
        # Create the series at 0: Prometheus sees no increase when a series begins at 1.
        for outcome in _OUTCOMES:
            self._requests.labels(outcome)
        for outcome in _IMAGES:
            self._images.labels(outcome)
        for where in _COMPUTED:
            self._images_computed.labels(where)
        for outcome in _PREFIX_PULLS:
            self._prefix_pulls.labels(outcome)

    def placed(self, placement: Placement, took_s: float) -> None:
        self._placements.labels("pair" if placement.prefill else "alone").inc()
        self._placements_moved.inc(placement.moved)
        self._placements_without_scheduler.inc(placement.from_snapshot)
        self._placement_seconds.observe(took_s)

    def watch_workers(self, known: Callable[[], Iterable[str]]) -> None:
        """Set the function that returns the known workers' ids; it may be called from any thread."""
        self._workers.watch(known)

    def watch_waiting(self, queue: Sized, estimate_s: Callable[[], float]) -> None:
        """Show a queue's length and the expected wait: for several queues, the sum and the maximum."""
        self._queues.append((queue, estimate_s))
        self._waiting_requests.set_function(lambda: sum(len(one) for one, _ in self._queues))
        self._waiting_estimate_seconds.set_function(lambda: max(estimate() for _, estimate in self._queues))

    def refused(self, reason: str) -> None:
        self._clients_refused.labels(reason).inc()

    def images(self, outcome: str, count: int, seconds: float) -> None:
        """Count the images of one request."""
        self._images.labels(outcome).inc(count)
        self._images_seconds.observe(seconds)

    def image_sent(self, role: str, size: int) -> None:
        self._image_bytes.labels(role).inc(size)

    def images_computed(self, where: str, count: int = 1) -> None:
        self._images_computed.labels(where).inc(count)

    def turned_away(self, error: RequestFailed) -> None:
        """Count a request refused for lack of room before it started a sequence."""
        self._requests.labels("refused").inc()
        if isinstance(error, NotAdmitted):
            self.rejections.labels(error.why).inc()

    def retried(self, trouble: str, worker_id: str) -> None:
        self._workers.counted(worker_id)
        self._retries.labels(trouble, worker_id).inc()

    def first_token(self, state: RequestState, worker_id: str) -> None:
        """Count a request's first token; `worker_id` prefilled it."""
        timings = state.timings
        exemplar = _exemplar(state)
        self._time_to_first_token_seconds.observe(state.first_token - state.http.arrived, exemplar)
        for stage, seconds in seconds_by_stage(to_first_token(state)).items():
            self._ttft[stage].observe(seconds, exemplar)
        if timings.prefill_began:
            self._workers.counted(worker_id)
            self._queue_seconds.labels(worker_id).observe(max(0.0, timings.prefill_began - timings.placed))

    def delivered(self, state: RequestState) -> None:
        """Count the last stage of a stream's first token: its delivery to the client's socket."""
        self._ttft["deliver"].observe(state.http.first_byte - state.first_token, _exemplar(state))

    def gap(self, stage: str, seconds: float) -> None:
        self._gap[stage].observe(max(0.0, seconds))

    def saved(self, state: RequestState) -> None:
        """Count KV that a prefill worker has saved; the transport is not known yet."""
        self._handoff_stage_seconds.labels("save", "none").observe(state.timings.save_ms / 1e3)

    def admitted(self, admitted: worker_pb2.Admitted, state: RequestState, worker_id: str) -> None:
        transport = admitted.transport or "none"
        if state.timings.first_token:
            since = max(0.0, state.timings.admitted - state.timings.first_token)
            self._workers.counted(worker_id)
            self._handoff_seconds.labels(worker_id, transport).observe(since)
        for stage in _STAGES:
            seconds = getattr(admitted, stage) / 1e3
            self._handoff_stage_seconds.labels(stage.removesuffix("_ms"), transport).observe(seconds)
        if state.timings.saved:  # the step continues after the save: it samples the token
            sampled = state.timings.prefill_ended - state.timings.saved
            self._handoff_stage_seconds.labels("sample", transport).observe(max(0.0, sampled))
        self._handoff_bytes.labels(transport).inc(admitted.bytes)
        self._handoff_early_bytes.labels(transport).inc(admitted.early_bytes)

    def prefix_pull(self, outcome: str, tokens: int = 0) -> None:
        """Count a request for a prompt's first blocks from another worker, and the tokens pulled."""
        self._prefix_pulls.labels(outcome).inc()
        self._prefix_pulled_tokens.inc(tokens)

    def over(self, state: RequestState) -> None:
        if state.attempts:
            self.live_requests.dec()
            self._request_attempts.observe(state.attempts)
        self._requests.labels(state.outcome).inc()
        self.classes.over(state)


def _exemplar(state: RequestState) -> dict[str, str] | None:
    trace = state.trace
    return {"trace_id": trace.trace_id} if trace.sampled else None


class ClassMetrics(Metrics):
    """Metrics of each class, updated when a request begins and ends, never per token."""

    prefix = "baton_router_class_"

    _goals = counter(
        "Requests by goal (ttft, itl), placement and whether the goal was met; aborted ones do not count",
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
                for kind in _PLACED if value else ():
                    for met in _MET:
                        self._goals.labels(one.name, goal, kind, met)

    def waiting(self, service: ServiceClass, change: int) -> None:
        """Count a request that joins the queue (1) or leaves it (-1)."""
        self._waiting_requests.labels(service.name).inc(change)

    def over(self, state: RequestState) -> None:
        service, gap = state.service, state.mean_gap_s
        self._output_tokens.labels(service.name).inc(len(state.tokens))
        ttft = state.first_token - state.http.arrived if state.first_token else math.inf
        if state.first_token:
            self._time_to_first_token_seconds.labels(service.name).observe(ttft)
        if state.outcome != "abort":
            self._count(state, "ttft", service.ttft_s, ttft)
        if gap is not None:
            self._mean_gap_seconds.labels(service.name).observe(gap)
            if state.outcome != "abort":
                self._count(state, "itl", service.itl_s, gap)

    def _count(self, state: RequestState, goal: str, most_s: float | None, seconds: float) -> None:
        if most_s is not None:
            pair = state.timings.prefiller != state.timings.decoder
            met = "yes" if seconds <= most_s else "no"
            self._goals.labels(state.service.name, goal, "pair" if pair else "alone", met).inc()


class TenantMetrics(Metrics):
    """Metrics of each tenant. A removed tenant's series are dropped a few minutes later."""

    prefix = "baton_router_tenant_"

    _requests = counter("HTTP requests admitted", "tenant")
    _refusals = counter("Requests refused with 429, by limit", "tenant", "limit")
    _tokens = counter("Tokens of completed requests: prompt, output", "tenant", "kind")
    _waiting_requests = gauge("Requests waiting for room on workers", "tenant")

    def __init__(self, registry: CollectorRegistry, clock: Callable[[], float]) -> None:
        self._series = LivingSeries("tenant", registry, clock)  # before the metrics: scraped in this order
        super().__init__(registry)
        self._series.keep(self.labelled("tenant"))
        self._counts: Counts[str] = Counts()  # waiting requests by tenant, without zeros

    def watch(self, known: Callable[[], Iterable[str]]) -> None:
        """Set the function that returns all tenants' names; it may be called from any thread."""
        self._series.watch(known)

    def entered(self, tenant: str) -> None:
        if label := self._label(tenant):
            self._requests.labels(label).inc()

    def refused(self, tenant: str, limit: str) -> None:
        if label := self._label(tenant):
            self._refusals.labels(label, limit).inc()

    def used(self, tenant: str, prompt: int, output: int) -> None:
        if label := self._label(tenant):
            self._tokens.labels(label, "prompt").inc(prompt)
            self._tokens.labels(label, "output").inc(output)

    def waiting(self, tenant: str, change: int) -> None:
        """Count a request that joins the queue (1) or leaves it (-1); not for tenants in `OTHERS`."""
        self._counts[tenant] += change
        count = self._counts[tenant]
        if not count:
            del self._counts[tenant]
        if (label := self._label(tenant)) and label != OTHERS:
            self._waiting_requests.labels(label).set(count)  # not inc(): the series may have been dropped

    def _label(self, tenant: str) -> str:
        if not tenant:
            return ""
        label = tenant if tenant in self._series or len(self._series) < MAX_TENANTS else OTHERS
        self._series.counted(label)
        return label


class LivingSeries(Collector):
    """At each scrape, removes the series whose label value has not been known or counted for `GONE_S`."""

    def __init__(self, label: str, registry: CollectorRegistry, clock: Callable[[], float]) -> None:
        self._label = label
        self._clock = clock
        self._metrics: list[Counter | Gauge | Histogram] = []
        self._last: dict[str, float] = {}  # the label's value -> when it was last known or counted
        self._known: Callable[[], Iterable[str]] = tuple
        registry.register(self)

    def __len__(self) -> int:
        return len(self._last)

    def __contains__(self, value: str) -> bool:
        return value in self._last

    def keep(self, metrics: Iterable[Counter | Gauge | Histogram]) -> None:
        """Remove old series of these metrics, too. They must have the label."""
        self._metrics += metrics

    def watch(self, known: Callable[[], Iterable[str]]) -> None:
        """Set the function that returns the known values; it is called in a scrape's thread."""
        self._known = known

    def counted(self, value: str) -> None:
        self._last[value] = self._clock()

    def describe(self) -> Iterable[Metric]:
        """Return no metrics: this collector only removes series."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Remove old series. Return no metrics."""
        now = self._clock()
        known = set(self._known())
        for value, last in list(self._last.items()):
            if value in known:
                self._last[value] = now
            elif now - last > GONE_S:
                self._last.pop(value, None)  # another scrape may have removed it already
                for metric in self._metrics:
                    metric.remove_by_labels({self._label: value})
        return ()
