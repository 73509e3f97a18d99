"""Metrics with one series per worker: for the workers alive, not for all that ever were."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram, Metric
from prometheus_client.registry import Collector

GONE_S = 300.0  # s; the counts of a worker's last moments are still scraped a few times

M = TypeVar("M", Counter, Histogram)


class WorkerSeries(Collector):
    """Removes, at each scrape, the series of workers neither known nor counted for `GONE_S`.

    A restarted worker has another id, and series of its own.
    """

    def __init__(self, registry: CollectorRegistry, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._metrics: list[Counter | Histogram] = []
        self._last: dict[str, float] = {}  # worker id -> when it was last known or counted
        self._known: Callable[[], Iterable[str]] = tuple
        registry.register(self)

    def keep(self, metric: M) -> M:
        """Take care of a metric whose labels include `worker`, and return it."""
        self._metrics.append(metric)
        return metric

    def watch(self, known: Callable[[], Iterable[str]]) -> None:
        """Set the function that returns the ids of known workers; it is called in the thread of a scrape."""
        self._known = known

    def counted(self, worker_id: str) -> None:
        """Note that the worker has a new value. To be called with each."""
        self._last[worker_id] = self._clock()

    def describe(self) -> Iterable[Metric]:
        """Return nothing: it has no metric of its own."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Remove old series. Return nothing: it has no metric of its own."""
        now = self._clock()
        known = set(self._known())
        for worker_id, last in list(self._last.items()):
            if worker_id in known:
                self._last[worker_id] = now
            elif now - last > GONE_S:
                del self._last[worker_id]
                for metric in self._metrics:
                    metric.remove_by_labels({"worker": worker_id})
        return ()
