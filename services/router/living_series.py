"""Remove the series of workers and tenants some minutes after these are gone."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.registry import Collector

GONE_S = 300.0  # long enough to scrape the last counts a few times


class LivingSeries(Collector):
    """At each scrape, removes the series whose label value was not known or counted for `GONE_S`."""

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
        """Remove old series of these metrics, which have the label."""
        self._metrics += metrics

    def watch(self, known: Callable[[], Iterable[str]]) -> None:
        """Set the function that returns the known values; it is called in a scrape's thread."""
        self._known = known

    def counted(self, value: str) -> None:
        """Record that a metric with this value was updated."""
        self._last[value] = self._clock()

    def describe(self) -> Iterable[Metric]:
        """Return no metric of its own."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Remove old series. Return no metric of its own."""
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
