"""Medians and percentiles, and result files that name their machine and commit."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from harness.support import ROOT

RESULTS = ROOT / "bench" / "results"


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which `share` (0 to 1) of the values are; nan if there are no values."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def median(values: Sequence[float]) -> float:
    """Return the median; nan if there are no values."""
    return statistics.median(values) if values else float("nan")


def medians(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    return {key: round(median([run[key] for run in runs]), 3) for key in runs[0]}


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median and quartiles. Raises ValueError for too few values."""
    p25, p50, p75 = statistics.quantiles(values, n=4, method="inclusive")
    return {"p25": _short(p25), "p50": _short(p50), "p75": _short(p75)}


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def compared(arms: dict[str, Sequence[float]]) -> dict[str, dict[str, float]]:
    """Return the spreads of two arms that were measured alternately, and of the second's ratio to the first.

    Ratios are taken pair by pair, which cancels slow moments of the machine. Raises ValueError if a pair is
    incomplete.
    """
    first, second = arms.values()
    ratio = spread([after / before for before, after in zip(first, second, strict=True)])
    return {**{name: spread(values) for name, values in arms.items()}, "ratio": ratio}


def save(name: str, result: dict[str, Any], folder: Path | None = None) -> Path:
    """Write a result with its machine, commit and command to NAME.json in bench/results or `folder`."""
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
    known = {"machine": machine, "tree": tree(), "command": command()}
    path.write_text(json.dumps(known | result, indent=2) + "\n")
    return path


def saved(name: str, folder: Path | None = None) -> dict[str, Any]:
    """Return an earlier result without what `save` adds; empty if there is none."""
    path = (folder or RESULTS) / f"{name}.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return {key: value for key, value in found.items() if key not in ("machine", "tree", "command")}


def command() -> str:
    """Return this process's command, with paths as FILE, if it is a module of this checkout, else ""."""
    main = Path(sys.argv[0])
    if main.suffix != ".py" or not main.is_relative_to(ROOT) or main.relative_to(ROOT).parts[0][0] == ".":
        return ""
    module = ".".join(main.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")
    arguments = [re.sub(r"(^|=)/.*", r"\1FILE", one) for one in sys.argv[1:]]
    return shlex.join(["python", "-m", module, *arguments])


def tree(folder: Path = ROOT) -> dict[str, Any]:
    """Return a checkout's commit ("" without git) and whether files other than results differ from it."""
    try:
        commit = _git(folder, "rev-parse", "HEAD")
        changed = _git(folder, "status", "--porcelain", "--", ".", ":(exclude)bench/results")
    except (OSError, subprocess.CalledProcessError):
        return {"commit": "", "dirty": True}
    return {"commit": commit, "dirty": bool(changed)}


def _git(folder: Path, *command: str) -> str:
    done = subprocess.run(["git", "-C", folder, *command], capture_output=True, check=True, text=True)
    return done.stdout.strip()


def _has(package: str) -> bool:
    return any(True for _ in metadata.distributions(name=package))


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
