"""Measure Baton with several workers on one GPU (fleet.devices).

    python -m bench gpu-serve                                  the first three parts, 8 minutes on an H100
    python -m bench gpu-serve --parts answers --arms one shm   one part, and some of its arms
    python -m bench gpu-serve --parts load --sizes 8 --clients 64

    answers   the demo model's greedy answers in every arm (transports, attention, graphs, drafts) against one
              engine's; handoff times by stage; drafted and accepted tokens
    streams   streams while long prompts arrive: 1P1D, one engine in vLLM's order, one in Baton's
    load      closed loops of 1 to 256 clients: 1P1D and one engine
    models    models of many kinds: 1P1D, with and without drafts and encode workers, against one engine.
              Only with --parts
    compiled  streams with vLLM's defaults and torch.compile; the other parts capture only decode steps.
              Only with --parts

streams and load use the shapes of Qwen3 1.7B and 8B with random weights. An arm that cannot start is left out
and named in the result. Each turn is saved at once in bench/results/gpu-serve.json; a part that is run alone
replaces only its own figures.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from bench import gpu_answers, gpu_loads, gpu_models
from bench.gpu_fleet import Served, StartFailed, serving
from bench.options import options
from harness.checkpoints import QWEN3, qwen3_shape
from harness.stats import command, save, saved

PARTS = ("answers", "streams", "load", "models", "compiled")
LOADED = ("1P1D", "one-stock")  # default arms of load and compiled
ROUTERS = 4  # processes; one carries about 15,000 tokens/s
SETTINGS: dict[str, Any] = {"ops": {"listen": ""}}
KeepPart = Callable[[str, Served, dict[str, Any]], None]
Turn = tuple[Sequence[str], str]  # parts that share a deployment, and the model's size or ""


class Results:
    """The file of results, rewritten after each turn."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._all = saved(name)
        self._taken = {"command": command(), "when": datetime.now(UTC).strftime("%Y-%m-%d"), **card()}

    def keep(self, size: str, part: str, served: Served, found: dict[str, Any]) -> None:
        """Write a part's figures so far. size: of the model, or ""."""
        whole = {"taken": self._taken, "start_s": served.start_s, "failed": served.failed, **found}
        if size:
            self._all.setdefault(part, {})[size] = whole
        else:
            self._all[part] = whole
        self._all.get("failures", {}).pop(_named([part], size), None)
        save(self._name, self._all)

    def fail(self, parts: Sequence[str], size: str, why: str) -> None:
        """Record a failed turn for those of its parts that have no figures of this run."""
        for part in parts:
            known = self._all.get(part, {}).get(size, {}) if size else self._all.get(part, {})
            if known.get("taken") is not self._taken:
                failures = self._all.setdefault("failures", {})
                failures[_named([part], size)] = {"taken": self._taken, "why": why}
        save(self._name, self._all)


def card() -> dict[str, str]:
    """Return the GPU's name and driver version; empty without nvidia-smi."""
    line = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(line, capture_output=True, check=True, text=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    name, _, driver = (said.splitlines() or [""])[0].partition(", ")
    return {"gpu": name, "driver": driver}


def answers(given: argparse.Namespace, folder: Path, keep: KeepPart) -> None:
    names = _chosen(given, gpu_answers.ARMS) or gpu_answers.USUAL
    arms = {name: gpu_answers.ARMS[name] for name in names}
    with serving(folder / "answers", arms, gpu_answers.ENGINE, given.start_s, **SETTINGS) as served:
        asyncio.run(gpu_answers.compare(served, given.tokens, partial(keep, "answers", served)))


def models(given: argparse.Namespace, folder: Path, keep: KeepPart) -> None:
    names = _chosen(given, gpu_models.MODELS) or list(gpu_models.MODELS)
    arms, sections = gpu_models.arms(names), SETTINGS | gpu_models.SECTIONS
    with serving(folder / "models", arms, {}, given.start_s, **sections) as served:
        asyncio.run(gpu_models.compare(served, given.tokens, partial(keep, "models", served)))


def loads(parts: Sequence[str], size: str, given: argparse.Namespace, folder: Path, keep: KeepPart) -> None:
    """Run parts that share a deployment: streams and load of a size, or compiled."""
    chosen = _chosen(given, gpu_loads.FLEETS)
    names = chosen or list(LOADED if size == "8" or "streams" not in parts else gpu_loads.FLEETS)
    model = str(qwen3_shape(folder / f"model-{size}", size, 2 * gpu_loads.LENGTH))
    arms = gpu_loads.arms(names, model, compiled="compiled" in parts, eager=given.eager)
    place = folder / ("-".join(parts) + f"-{size}")
    sections = {**SETTINGS, "router": {"processes": ROUTERS}}
    with serving(place, arms, gpu_loads.engine(size), given.start_s, **sections) as served:
        for part in parts:
            known = partial(keep, part, served)
            if part == "load":
                some = [name for name in served.arms if chosen or name in LOADED]
                gpu_loads.closed_loops(served, some, given.clients, given.load_seconds, known)
            else:
                gpu_loads.streams(served, given.seconds, given.rounds, known)


def main(arguments: list[str]) -> None:
    given = options(
        __doc__,
        arguments,
        parts=(list(PARTS[:3]), None, PARTS),
        arms=([str], "arms of any of the parts; all by default"),
        sizes=(["1.7", "8"], "of the models", list(QWEN3)),
        tokens=(64, "of each compared answer"),
        seconds=(8.0, "of streams, each time"),
        rounds=(2, "of streams on each arm"),
        load_seconds=(5.0, "of a closed loop"),
        clients=([1, 8, 64, 256], "of closed loops"),
        start_s=(120.0, "timeout of a deployment's start"),
        eager=(False, "run streams and load without graphs"),
        folder=(Path, "keep configurations and logs here"),
        save=("gpu-serve", "name of the file in bench/results"),
    )
    known = {*gpu_answers.ARMS, *gpu_models.MODELS, *gpu_loads.FLEETS}
    if unknown := set(given.arms or []) - known:
        raise SystemExit(f"--arms {' '.join(sorted(unknown))}: known are {' '.join(sorted(known))}")
    signal.signal(signal.SIGTERM, _terminated)
    results, failed = Results(given.save), []
    with nullcontext(given.folder) if given.folder else tempfile.TemporaryDirectory() as at:
        folder = Path(at).resolve()
        for parts, size in turns(given.parts, given.sizes):
            name, began = _named(parts, size), time.monotonic()
            print(f"-- {name}", flush=True)
            try:
                if size:
                    loads(parts, size, given, folder, partial(results.keep, size))
                else:
                    alone = answers if parts == ["answers"] else models
                    alone(given, folder, partial(results.keep, size))
            except (*gpu_loads.PROBLEMS, StartFailed) as problem:
                failed.append(name)
                results.fail(parts, size, repr(problem)[-800:])
                print(f"{name} failed: {problem!r}"[-2000:], flush=True)
            print(f"-- {name}: {time.monotonic() - began:.0f} s", flush=True)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


def _chosen(given: argparse.Namespace, known: Collection[str]) -> list[str]:
    return [name for name in given.arms or () if name in known]


def _terminated(*_: object) -> None:
    """Exit, which ends the deployment. `timeout` signals twice, so ignore the second signal."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(128 + signal.SIGTERM)


def _named(parts: Sequence[str], size: str) -> str:
    return " and ".join(parts) + (f" of {size}B" if size else "")


def turns(parts: list[str], sizes: list[str]) -> list[Turn]:
    found: list[Turn] = [([part], "") for part in ("answers", "models") if part in parts]
    if together := [part for part in parts if part in ("streams", "load")]:
        found += [(together, size) for size in sizes]
    if "compiled" in parts:
        found += [(["compiled"], size) for size in sizes]
    return found
