"""Baton on one GPU: several workers share it (fleet.devices).

    python -m bench gpu-serve                                  all, within 8 minutes on an H100
    python -m bench gpu-serve --parts answers --arms one shm   one part, and some of its arms
    python -m bench gpu-serve --parts load --sizes 8 --clients 64

    answers   greedy answers of every arm (transports, attention, graphs, ways to draft) against those of one
              engine, with the demo model; what handoffs took by stage; drafts and how many were accepted
    streams   streams beside long prompts: 1P1D, one engine in vLLM's own order, and one in Baton's
    load      closed loops of 1 to 256 clients: 1P1D and one engine
    compiled  streams of 1P1D and one engine as vLLM comes, with torch.compile; else engines have graphs of
              decode steps alone. Only where it is asked for

streams and load use the shapes of Qwen3 1.7B and 8B with random weights.
An arm that cannot start is left out and named in the result. Each turn is on disk at once, in
bench/results/gpu-serve.json: a part that is run alone replaces its own figures there.
"""

from __future__ import annotations

import argparse
import asyncio
import json
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

from bench import gpu_answers, gpu_loads
from bench.gpu_fleet import Served, StartFailed, serving
from harness.checkpoints import QWEN3, qwen3_shape
from harness.stats import RESULTS, command, save

PARTS = ("answers", "streams", "load", "compiled")
LOADED = ("1P1D", "one-stock")  # what load and compiled take if nothing is said
ROUTERS = 4  # processes: one carries some 15,000 tokens/s
SETTINGS = {"ops": {"listen": ""}}
KeepPart = Callable[[str, Served, dict[str, Any]], None]
Turn = tuple[Sequence[str], str]  # parts that are measured in one deployment, and the model's size or ""


class Results:
    """The file of results, written anew after each turn."""

    def __init__(self, name: str) -> None:
        self._name = name
        file = RESULTS / f"{name}.json"
        self._all: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
        for key in ("machine", "tree", "command"):  # those of this run take their place
            self._all.pop(key, None)
        self._taken = {"command": command(), "when": datetime.now(UTC).strftime("%Y-%m-%d"), **card()}

    def keep(self, size: str, part: str, served: Served, found: dict[str, Any]) -> None:
        """Write what is known of a part; "" as the size of one that has none."""
        whole = {"taken": self._taken, "start_s": served.start_s, "failed": served.failed, **found}
        if size:
            self._all.setdefault(part, {})[size] = whole
        else:
            self._all[part] = whole
        self._all.get("failures", {}).pop(_named([part], size), None)
        save(self._name, self._all)

    def fail(self, parts: Sequence[str], size: str, why: str) -> None:
        """Write that a turn failed, for those of its parts of which this run has no figures."""
        for part in parts:
            known = self._all.get(part, {}).get(size, {}) if size else self._all.get(part, {})
            if known.get("taken") is not self._taken:
                failures = self._all.setdefault("failures", {})
                failures[_named([part], size)] = {"taken": self._taken, "why": why}
        save(self._name, self._all)


def card() -> dict[str, str]:
    """Return the GPU's name and its driver's version; nothing where nvidia-smi is not there."""
    line = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(line, capture_output=True, check=True, text=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    name, _, driver = (said.splitlines() or [""])[0].partition(", ")
    return {"gpu": name, "driver": driver}


def answers(options: argparse.Namespace, folder: Path, keep: KeepPart) -> None:
    """Compare the arms' answers."""
    names = _chosen(options, gpu_answers.ARMS) or gpu_answers.USUAL
    arms = {name: gpu_answers.ARMS[name] for name in names}
    with serving(folder / "answers", arms, gpu_answers.ENGINE, options.start_s, **SETTINGS) as served:
        asyncio.run(gpu_answers.compare(served, options.tokens, partial(keep, "answers", served)))


def loads(parts: Sequence[str], size: str, options: argparse.Namespace, folder: Path, keep: KeepPart) -> None:
    """Measure streams and load of a size in one deployment, or what is compiled in one of its own."""
    chosen = _chosen(options, gpu_loads.FLEETS)
    names = chosen or list(LOADED if size == "8" or "streams" not in parts else gpu_loads.FLEETS)
    model = str(qwen3_shape(folder / f"model-{size}", size, 2 * gpu_loads.LENGTH))
    arms = gpu_loads.arms(names, model, compiled="compiled" in parts, eager=options.eager)
    place = folder / ("-".join(parts) + f"-{size}")
    sections = {**SETTINGS, "router": {"processes": ROUTERS}}
    with serving(place, arms, gpu_loads.engine(size), options.start_s, **sections) as served:
        for part in parts:
            known = partial(keep, part, served)
            if part == "load":
                some = [name for name in served.arms if chosen or name in LOADED]
                gpu_loads.closed_loops(served, some, options.clients, options.load_seconds, known)
            else:
                gpu_loads.streams(served, options.seconds, options.rounds, known)


def main(arguments: list[str]) -> None:
    """Run it."""
    parser = argparse.ArgumentParser(
        prog="python -m bench gpu-serve",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS[:3]))
    parser.add_argument("--arms", nargs="+", help="of answers, of the other parts, or both; all by default")
    parser.add_argument("--sizes", nargs="+", choices=QWEN3, default=["1.7", "8"], help="of the models")
    parser.add_argument("--tokens", type=int, default=64, help="of the answers that are compared")
    parser.add_argument("--seconds", type=float, default=8.0, help="of streams, each time")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each arm with streams")
    parser.add_argument("--load-seconds", type=float, default=5.0, help="of a closed loop")
    parser.add_argument("--clients", nargs="+", type=int, default=[1, 8, 64, 256], help="of closed loops")
    parser.add_argument("--start-s", type=float, default=120.0, help="that a deployment may take to start")
    parser.add_argument("--eager", action="store_true", help="no graphs in streams and load")
    parser.add_argument("--folder", type=Path, help="keep configurations and logs there")
    parser.add_argument("--save", default="gpu-serve", help="name of the file in bench/results")
    options = parser.parse_args(arguments)
    known = {*gpu_answers.ARMS, *gpu_loads.FLEETS}
    if unknown := set(options.arms or []) - known:
        parser.error(f"--arms {' '.join(sorted(unknown))}: known are {' '.join(sorted(known))}")
    signal.signal(signal.SIGTERM, _terminated)
    results, failed = Results(options.save), []
    with nullcontext(options.folder) if options.folder else tempfile.TemporaryDirectory() as at:
        folder = Path(at).resolve()
        for parts, size in turns(options.parts, options.sizes):
            name, began = _named(parts, size), time.monotonic()
            print(f"-- {name}", flush=True)
            try:
                if size:
                    loads(parts, size, options, folder, partial(results.keep, size))
                else:
                    answers(options, folder, partial(results.keep, size))
            except (*gpu_loads.PROBLEMS, StartFailed) as problem:
                failed.append(name)
                results.fail(parts, size, repr(problem)[-800:])
                print(f"{name} failed: {problem!r}"[-2000:], flush=True)
            print(f"-- {name}: {time.monotonic() - began:.0f} s", flush=True)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


def _chosen(options: argparse.Namespace, known: Collection[str]) -> list[str]:
    """Return the arms that were named of those known; none if all are wanted."""
    return [name for name in options.arms or () if name in known]


def _terminated(*_: object) -> None:
    """End the deployment, too; `timeout` sends the signal twice, and the second one must not cut that off."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(128 + signal.SIGTERM)


def _named(parts: Sequence[str], size: str) -> str:
    return " and ".join(parts) + (f" of {size}B" if size else "")


def turns(parts: list[str], sizes: list[str]) -> list[Turn]:
    """Return the turns in order."""
    found: list[Turn] = [(["answers"], "")] if "answers" in parts else []
    if together := [part for part in parts if part in ("streams", "load")]:
        found += [(together, size) for size in sizes]
    if "compiled" in parts:
        found += [(["compiled"], size) for size in sizes]
    return found
