"""Read the metrics of running processes."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from harness.support import CALL_S


def samples(url: str, query: str = "") -> Iterator[Sample]:
    """Yield the samples at URL/metrics. query: `?all` asks a router for the samples of all its processes."""
    with urllib.request.urlopen(f"{url}/metrics{query}", timeout=CALL_S) as answer:
        text = answer.read().decode()
    for family in text_string_to_metric_families(text):
        yield from family.samples


def total(url: str, name: str, **labels: str) -> float:
    """Return the sum of the samples with this name and these labels."""
    return sum(
        sample.value
        for sample in samples(url)
        if sample.name == name and labels.items() <= sample.labels.items()
    )
