"""The metrics that each kind of process declares."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry

from baton.scheduler.metrics import Metrics
from baton.services.router.metrics import RouterMetrics
from baton.services.worker.drafting import DraftMetrics
from baton.services.worker.metrics import WorkerMetrics


def registries() -> dict[str, CollectorRegistry]:
    """Return the registry of each kind of process."""
    worker = WorkerMetrics()
    DraftMetrics(worker.registry, "mtp", 1, 1)
    router = CollectorRegistry()
    RouterMetrics(router)
    return {"Worker": worker.registry, "Router": router, "Scheduler": Metrics().registry}


def declared(registry: CollectorRegistry) -> list[Any]:
    """Return Baton's own metrics in a registry, by name."""
    named = [one for one, names in registry._collector_to_names.items() if names]
    return sorted((one for one in named if hasattr(one, "_documentation")), key=lambda one: str(one._name))


def series_names() -> set[str]:
    """Return the names of all possible series, with _total, _bucket, _sum and _count."""
    found = set()
    for registry in registries().values():
        for family in registry.collect():
            endings = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}
            found |= {family.name + ending for ending in endings.get(family.type, ("",))}
    return found
