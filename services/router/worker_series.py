"""Metrics with a series a worker: as many series as workers, not as many as there ever were."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram, Metric
from prometheus_client.registry import Collector

GONE_S = 300.0  # s; what a worker's last moments counted is still scraped a few times

M = TypeVar("M", Counter, Histogram)


class WorkerSeries(Collector):
    """Removes the series of workers that were neither there nor written of for `GONE_S`, at each scrape.

    A worker that starts again has another id, and series of its own.
    """

    def __init__(self, registry: CollectorRegistry, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._metrics: list[Counter | Histogram] = []
        self._last: dict[str, float] = {}  # worker id -> when it was there, or written of
        self._there: Callable[[], Iterable[str]] = tuple
        registry.register(self)

    def keep(self, metric: M) -> M:
        """From now on care for this one, whose labels have a `worker` among them."""
        self._metrics.append(metric)
        return metric

    def watch(self, there: Callable[[], Iterable[str]]) -> None:
        """`there` tells the ids of the workers that are known. Called in the thread of a scrape."""
        self._there = there

    def wrote(self, worker_id: str) -> None:
        """To be called with each value that has this label."""
        self._last[worker_id] = self._clock()

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        """Nothing of its own."""
        now = self._clock()
        there = set(self._there())
        for worker_id, last in list(self._last.items()):
            if worker_id in there:
                self._last[worker_id] = now
            elif now - last > GONE_S:
                del self._last[worker_id]
                for metric in self._metrics:
                    metric.remove_by_labels({"worker": worker_id})
        return ()
