"""Run a part of a deployment or `baton up` in a process that harness/zygote.py forked."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from harness import zygote

WORKER_KINDS = ("prefill", "decode", "mixed")


def run(
    kind: str,
    settings: dict[str, Any],
    path: str = "",
    environment: Mapping[str, str] = MappingProxyType({}),
    unique: bool = True,
    constants: Mapping[str, float] = MappingProxyType({}),
) -> None:
    """Run a scheduler, a router or a worker until it ends.

    path: a folder of extra packages; unique: append the process id to the worker id, as `baton up` does;
    constants: `module:NAME` -> value in this process.
    """
    from baton.services.config import Settings
    from baton.services.leave import leave

    zygote.set_constants(constants)
    os.environ.update(environment)
    if path:
        sys.path.insert(0, path)
    faulthandler.register(signal.SIGUSR1)  # ranks inherit it
    loaded = Settings(**settings)
    if kind == "scheduler":
        from baton.services.fleet.scheduler import run_scheduler

        run_scheduler(loaded)
    elif kind == "router":
        from baton.services.fleet.routers import run_routers

        run_routers(loaded)
        leave(0)
    else:
        from baton.services.worker.lifecycle import run_worker
        from harness.ranks import fork_ranks

        if loaded.engine.ranks > 1:
            fork_ranks()
        if unique:
            loaded.worker.worker_id += f".{os.getpid()}"
        run_worker(loaded, kind)


def up(fleet: dict[str, int], settings: dict[str, Any], logs: str, forgetful: bool) -> None:
    """Run `baton up` with one core per worker: OpenMP threads that share a busy core spin.

    forgetful: workers drop the drafter's state of every handoff.
    """
    from baton.services.config import Settings
    from baton.services.fleet import devices, supervisor

    def one_core_each(gpus: Sequence[int], named: Sequence[str] | None = None) -> list[devices.Devices]:
        del named
        return devices._cpus(max(len(gpus), 2))[: len(gpus)]

    if forgetful:
        from harness.forgetful.forgetful import register

        register()
    devices.assign = one_core_each
    supervisor.supervise(Settings(**settings), supervisor.Fleet(**fleet), logs, _log)


def _log(event: dict[str, Any]) -> None:
    if event["event"] == "step":
        print(f"[{event['since_start_s']:5.1f} s] {event['name']} {event['text']}", flush=True)
    elif event["event"] in ("ready", "ended"):
        print("Ready." if event["event"] == "ready" else "ended", flush=True)
