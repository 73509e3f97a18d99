"""Check that docs/observability.md lists every metric of the code; run this file to print the tables."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from baton.scheduler.metrics import Metrics
from baton.services.router.metrics import RouterMetrics
from baton.services.worker.draft_metrics import DraftMetrics
from baton.services.worker.metrics import WorkerMetrics
from harness.support import ROOT

PAGE = ROOT / "docs" / "observability.md"


def registries() -> dict[str, CollectorRegistry]:
    worker = WorkerMetrics()
    DraftMetrics(worker.registry, "mtp", 1, 1)
    router = CollectorRegistry()
    RouterMetrics(router)
    return {"Worker": worker.registry, "Router": router, "Scheduler": Metrics().registry}


def table(registry: CollectorRegistry) -> str:
    named = [one for one, names in registry._collector_to_names.items() if names]  # type: ignore[attr-defined]
    metrics: list[Any] = sorted(named, key=lambda one: str(one._name))
    rows = ["| metric | type | labels | what |", "| --- | --- | --- | --- |"]
    for one in metrics:
        name = one._name + ("_total" if one._type == "counter" else "")
        labels = ", ".join(one._labelnames) or "-"
        rows.append(f"| `{name}` | {one._type} | {labels} | {one._documentation.rstrip('.')} |")
    return "\n".join(rows)


@pytest.mark.parametrize("part", ["Worker", "Router", "Scheduler"])
def test_the_page_lists_every_metric(part: str) -> None:
    section = PAGE.read_text().partition(f"\n### {part}\n")[2].partition("\n#")[0]
    listed = section[section.index("| metric") :].strip()
    assert listed == table(registries()[part])


if __name__ == "__main__":
    for title, registry in registries().items():
        print(f"### {title}\n\n{table(registry)}\n")
