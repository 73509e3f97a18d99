"""Metrics with one series per worker or tenant, removed some minutes after that is gone."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.registry import Collector

GONE_S = 300.0  # the last counts are still scraped a few times


class LivingSeries(Collector):
    """Removes, at each scrape, series whose value was neither known nor counted for `GONE_S`.

    A restarted worker has another id, and its own series.
    """

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
        """Watch metrics that have the label."""
        self._metrics += metrics

    def watch(self, known: Callable[[], Iterable[str]]) -> None:
        """Set the function that returns the known values; it is called in the thread of a scrape."""
        self._known = known

    def counted(self, value: str) -> None:
        """Note a new count; call it with each."""
        self._last[value] = self._clock()

    def describe(self) -> Iterable[Metric]:
        """Return nothing: it has no metric of its own."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Remove old series. Return nothing: it has no metric of its own."""
        now = self._clock()
        known = set(self._known())
        for value, last in list(self._last.items()):
            if value in known:
                self._last[value] = now
            elif now - last > GONE_S:
                self._last.pop(value, None)  # another scrape may have been quicker
                for metric in self._metrics:
                    metric.remove_by_labels({self._label: value})
        return ()
