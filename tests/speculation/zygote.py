"""A process that imports vLLM once and forks whole deployments, as `baton up` forks workers.

Reads commands as JSON lines from stdin and answers each with one line on stdout.
    {"up": fleet, "settings": {...}, "log_dir": folder, "withhold": n}  ->  {"pid": n, "log": path}
    {"end": pid}  ->  {"exitcode": n}
Ends, and its deployments with it, when stdin does.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from baton.handoff.cache import Bytes, HostBlockCache
from baton.services.cli import devices, processes, supervisor
from baton.services.config import Settings
from baton.services.router import app
from baton.services.worker import lifecycle

END_S = 40.0


def main() -> None:
    lifecycle.preload()
    app.preload()
    # One core a worker, aggregated or not: figures of different fleets compare, and on a machine with other
    # work two threads that wait for each other crawl.
    devices.assign = _one_core_each
    print(json.dumps({"preloaded": True}), flush=True)
    children: dict[int, processes.Child] = {}
    for line in sys.stdin:
        command = json.loads(line)
        if "up" in command:
            child = processes.spawn("up", _run(command), Path(command["log_dir"]))
            children[child.process.pid or 0] = child
            answer: dict[str, Any] = {"pid": child.process.pid, "log": str(child.log)}
        else:
            child = children.pop(command["end"])
            processes.stop_all([child], END_S)
            answer = {"exitcode": child.process.exitcode}
        print(json.dumps(answer), flush=True)
    processes.stop_all(list(children.values()), END_S)


def _one_core_each(workers: int, gpus_each: int) -> list[devices.Devices]:
    del gpus_each
    cores = devices._cpus(max(workers, 2))
    return cores[:workers]


class _Log:
    """The supervisor's Report: what a reader of the log waits for."""

    def begun(self, log_dir: Path) -> None:
        del log_dir

    def step(self, since_start_s: float, name: str, text: str) -> None:
        print(f"[{since_start_s:5.1f} s] {name} {text}", flush=True)

    def ready(self) -> None:
        print("Ready.", flush=True)

    def ending(self) -> None:
        print("ending", flush=True)

    def ended(self) -> None:
        print("ended", flush=True)


def _run(command: dict[str, Any]) -> Callable[[], None]:
    fleet = supervisor.Fleet(**command["up"])

    def run() -> None:
        _withhold(command.get("withhold", 0))
        supervisor.supervise(Settings(**command["settings"]), fleet, command["log_dir"], _Log())

    return run


def _withhold(layers: int) -> None:
    """Load zeros as the last layers' KV, the drafter's: as if a handoff did not carry it."""
    if not layers:
        return
    scatter = HostBlockCache.scatter

    def scatter_without(self: HostBlockCache, records: Bytes, block_ids: Sequence[int]) -> None:
        records = records.copy()
        records[:, -sum(layer.block_bytes for layer in self.layers[-layers:]) :] = 0
        scatter(self, records, block_ids)

    HostBlockCache.scatter = scatter_without  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
