"""vLLM's metrics at a router: those of its front end, and those of the workers' engines.

A router has no engine, so families of engines' step statistics come from the workers' heartbeats, one series
per worker, or are not served (docs/observability.md).

Leans on: vllm.v1.metrics.loggers.PrometheusStatLogger (its makers of metrics, `_gauge_cls` and so on, which
it calls with keyword arguments alone; log_engine_initialized, which shows its own cache_config;
WAITING_REASON_CAPACITY, WAITING_REASON_DEFERRED), vllm.v1.metrics.perf.PerfMetricsProm (its maker, too),
vllm.v1.metrics.cache_hit_source.CacheHitSource; the names and labels of vLLM's families, which dashboards and
autoscalers know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.metrics.loggers import WAITING_REASON_CAPACITY, WAITING_REASON_DEFERRED, PrometheusStatLogger
from vllm.v1.metrics.perf import PerfMetricsProm

from baton.protos import scheduler_pb2 as pb
from baton.scheduler.booking import usable_blocks

# Engine metrics that heartbeats do not include: engines never sleep here, and the tokens that the front end
# takes at once are not an engine's step.
NOT_SERVED = frozenset(
    {
        "vllm:engine_sleep_state",
        "vllm:iteration_tokens_total",
        "vllm:estimated_flops_per_gpu_total",
        "vllm:estimated_read_bytes_per_gpu_total",
        "vllm:estimated_write_bytes_per_gpu_total",
    }
)

Values = Iterable[tuple[tuple[str, ...], float]]  # labels after model_name and engine, and the value


@dataclass(frozen=True)
class _Family:
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily]
    name: str
    text: str
    read: Callable[[pb.WorkerLoad, pb.Capacity], Values]
    labels: tuple[str, ...] = ()


def _waiting(load: pb.WorkerLoad, _: pb.Capacity) -> Values:
    yield (WAITING_REASON_CAPACITY,), load.waiting - load.deferred
    yield (WAITING_REASON_DEFERRED,), load.deferred


def _usage(load: pb.WorkerLoad, capacity: pb.Capacity) -> Values:
    # All three are 0 in a heartbeat that was sent while the worker was loading.
    known = load.free_blocks or load.running or load.waiting
    if known and (blocks := usable_blocks(capacity)):
        yield (), 1 - load.free_blocks / blocks


def _cached(load: pb.WorkerLoad, _: pb.Capacity) -> Values:
    yield (CacheHitSource.DEVICE.value,), load.counts.prefix_hits
    yield (CacheHitSource.P2P.value,), load.counts.external_hits


def _one(value: Callable[[pb.WorkerLoad], float]) -> Callable[[pb.WorkerLoad, pb.Capacity], Values]:
    return lambda load, _: (((), value(load)),)


def _drafting(value: Callable[[pb.EngineCounts], float]) -> Callable[[pb.WorkerLoad, pb.Capacity], Values]:
    """Read a value of workers that speculate; as in vLLM, other workers have no such series."""
    return lambda load, capacity: (((), value(load.counts)),) if capacity.speculative_method else ()


def _positions(load: pb.WorkerLoad, _: pb.Capacity) -> Values:
    for position, count in enumerate(load.counts.accepted_by_position):
        yield (str(position),), count


_gauge, _counter = partial(_Family, GaugeMetricFamily), partial(_Family, CounterMetricFamily)
_FAMILIES = (
    _gauge(
        "vllm:num_requests_running",
        "Number of requests in model execution batches.",
        _one(lambda load: load.running),
    ),
    _gauge(
        "vllm:num_requests_waiting",
        "Number of requests waiting to be processed.",
        _one(lambda load: load.waiting),
    ),
    _gauge(
        "vllm:num_requests_waiting_by_reason",
        "Number of requests waiting: for room (capacity), or for example for a handoff (deferred).",
        _waiting,
        ("reason",),
    ),
    _gauge("vllm:kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", _usage),
    _counter(
        "vllm:prefix_cache_queries",
        "Prompt tokens looked up in the worker's own prefix cache.",
        _one(lambda load: load.counts.prefix_queries),
    ),
    _counter(
        "vllm:prefix_cache_hits",
        "Prompt tokens found in the worker's own prefix cache.",
        _one(lambda load: load.counts.prefix_hits),
    ),
    _counter(
        "vllm:external_prefix_cache_queries",
        "Prompt tokens requested from a handoff.",
        _one(lambda load: load.counts.external_queries),
    ),
    _counter(
        "vllm:external_prefix_cache_hits",
        "Prompt tokens whose KV cache arrived by a handoff.",
        _one(lambda load: load.counts.external_hits),
    ),
    _counter(
        "vllm:prompt_tokens_cached_by_source",
        "Prompt tokens found in the worker's own prefix cache (device) or received by a handoff (p2p).",
        _cached,
        ("source",),
    ),
    _counter(
        "vllm:spec_decode_num_drafts",
        "Number of spec decoding drafts.",
        _drafting(lambda counts: counts.drafts),
    ),
    _counter(
        "vllm:spec_decode_num_draft_tokens",
        "Number of draft tokens.",
        _drafting(lambda counts: counts.drafted_tokens),
    ),
    _counter(
        "vllm:spec_decode_num_accepted_tokens",
        "Number of accepted tokens.",
        _drafting(lambda counts: sum(counts.accepted_by_position)),
    ),
    _counter(
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "Accepted tokens per draft position.",
        _positions,
        ("position",),
    ),
)
_NOT_FRONT_END = NOT_SERVED | {family.name for family in _FAMILIES}


@dataclass(frozen=True)
class ModelWorkers:
    heard: Callable[[], Iterable[pb.WorkerStatus]]  # workers with a recent heartbeat; called from any thread
    model: str  # vLLM's model_name
    caching: bool  # whether the engines keep a prefix cache

    def loaded(self) -> list[pb.WorkerStatus]:
        """Return the workers with a loaded language model."""
        return [
            one
            for one in self.heard()
            if one.HasField("load")
            and one.identity.HasField("capacity")
            and one.identity.role != pb.ROLE_ENCODE
        ]


class EngineMetrics(Collector):
    """vLLM's metrics of all models of a router process (label model_name), registered inside the block.

    The workers' series are made at each scrape, in a thread: 1,000 workers that draft four tokens have 19,000
    series: 2 MB of text, which takes 0.24 s on one core of an EPYC, nearly all of it in Prometheus' client.
    The event loop keeps running meanwhile.
    """

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self._registry = registry
        self._families: dict[str, Any] = {}  # the front end's families, by name
        self._models: list[ModelWorkers] = []

    def __enter__(self) -> Self:
        self._registry.register(self)
        return self

    def __exit__(self, *exc: object) -> None:
        self._registry.unregister(self)

    def watch(self, workers: ModelWorkers) -> None:
        self._models.append(workers)

    def logger(self) -> type[PrometheusStatLogger]:
        """Return a class: vLLM's Prometheus logger, which fills the front end's families.

        The first model's logger creates the families, with their buckets; the others reuse them.
        """
        gauge, counter, histogram = (self._maker(kind) for kind in (Gauge, Counter, Histogram))

        class NoPerfMetrics(PerfMetricsProm):
            _counter_cls = counter

        class FrontEndLogger(PrometheusStatLogger):
            _perf_metrics_cls = NoPerfMetrics
            _gauge_cls = gauge
            _counter_cls = counter
            _histogram_cls = histogram

            def log_engine_initialized(self) -> None:
                """Do nothing: `_cache_info` shows the engines' cache_config."""

        return FrontEndLogger

    def collect(self) -> Iterator[Metric]:
        """Yield the front end's families, then those of the workers, with a series per loaded engine."""
        for name, front_end in list(self._families.items()):
            if name not in _NOT_FRONT_END:
                yield from front_end.collect()
        seen = [(model, worker) for model in self._models for worker in model.loaded()]
        for family in _FAMILIES:
            metric = family.kind(family.name, family.text, labels=("model_name", "engine", *family.labels))
            for model, worker in seen:
                identity = worker.identity
                for labels, value in family.read(worker.load, identity.capacity):
                    metric.add_metric((model.model, identity.worker_id, *labels), value)
            yield metric
        yield self._cache_info(seen)

    def _cache_info(self, seen: Iterable[tuple[ModelWorkers, pb.WorkerStatus]]) -> Metric:
        """Return vLLM's cache_config_info, with the labels that workers report; the value is always 1."""
        labels = ("engine", "block_size", "num_gpu_blocks", "enable_prefix_caching")
        metric = GaugeMetricFamily("vllm:cache_config_info", "Information of the KV cache", labels=labels)
        for model, worker in seen:
            capacity = worker.identity.capacity
            blocks = str(capacity.block_size), str(capacity.num_blocks)
            metric.add_metric((worker.identity.worker_id, *blocks, str(model.caching)), 1)
        return metric

    def _maker(self, kind: Callable[..., Any]) -> Any:
        def make(*, name: str, **options: Any) -> Any:
            if name not in self._families:
                self._families[name] = kind(name=name, registry=None, **options)
            return self._families[name]

        return staticmethod(make)
