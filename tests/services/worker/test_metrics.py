"""A worker's metrics of saved handoffs."""

import math

import pytest

from baton.handoff.reports import Staged
from baton.services.worker.metrics import WorkerMetrics

NAMES = ("handoffs_pinned", "handoffs_pinned_bytes", "handoffs_pinned_overdue_seconds")


def scraped(metrics):
    """Scrape, and return the metrics of saved handoffs."""
    found = {sample.name: sample.value for one in metrics.registry.collect() for sample in one.samples}
    return [found[f"baton_worker_{name}"] for name in NAMES]


@pytest.mark.parametrize("staged", [Staged(handoffs=2, bytes=1024, capacity=1 << 20, overdue_s=1.5), None])
def test_one_scrape_asks_the_ranks_once(staged):
    """A question may take long if a rank hangs."""
    asked = []

    def ask():
        asked.append(staged)
        return staged

    metrics = WorkerMetrics()
    assert scraped(metrics) == [0, 0, 0]  # the engine is loading
    metrics.ask(ask, lambda: 3)
    found = scraped(metrics)
    assert len(asked) == 1
    if staged is None:
        assert all(map(math.isnan, found))
    else:
        assert found == [2, 1024, 1.5]
    scraped(metrics)
    assert len(asked) == 2
