"""Medians and percentiles, and results in files, with the machine on which they were taken."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from harness.support import ROOT

RESULTS = ROOT / "bench" / "results"


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which `share` (0 to 1) of the values lie; nan when there are none."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def median(values: Sequence[float]) -> float:
    """Return the median; nan when there are no values."""
    return statistics.median(values) if values else float("nan")


def medians(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the medians of several runs, key by key."""
    return {key: round(median([run[key] for run in runs]), 3) for key in runs[0]}


def save(name: str, result: dict[str, Any], folder: Path | None = None) -> Path:
    """Write a result and its machine into NAME.json, in bench/results by default. Return the file."""
    folder = folder or RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    machine = {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": _cpu(),
        "python": platform.python_version(),
        "packages": {name: metadata.version(name) for name in ("torch", "grpcio") if _has(name)},
        "when": datetime.now(UTC).strftime("%Y-%m-%d"),
    }
    path.write_text(json.dumps({"machine": machine, **result}, indent=2) + "\n")
    return path


def _has(package: str) -> bool:
    return any(True for _ in metadata.distributions(name=package))


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
