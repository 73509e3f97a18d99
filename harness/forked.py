"""Run a part of a deployment in a process that harness/zygote.py forked."""

from __future__ import annotations

import faulthandler
import os
import signal
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from harness import netns, zygote

WORKER_KINDS = ("prefill", "decode", "mixed", "encode")


def run(
    kind: str,
    settings: dict[str, Any],
    path: str = "",
    environment: Mapping[str, str] = MappingProxyType({}),
    unique: bool = True,
    constants: Mapping[str, float] = MappingProxyType({}),
    host: int = 0,
) -> None:
    """Run a scheduler, a router or a worker until it ends.

    unique: append the process id to the worker id, as `baton up` does; path, environment, constants: see
    zygote.prepare; host: move to the host with this first process (netns.move_to).
    """
    from baton.services.config import Settings
    from baton.services.leave import leave

    if host:
        netns.move_to(host)
    zygote.prepare(path, environment, constants)
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
