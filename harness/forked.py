"""Run a part of a deployment in a forked process; see harness/zygote.py."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

WORKER_KINDS = ("prefill", "decode", "mixed")


def run(
    kind: str,
    settings: dict[str, Any],
    path: str = "",
    environment: Mapping[str, str] = MappingProxyType({}),
    unique: bool = True,
) -> None:
    """Run a scheduler, a router or a worker until it ends.

    `path` is a folder of further packages. A worker that is `unique` has its process id in its worker id, so
    that its restarts share a name, as those of `baton up` do.
    """
    from baton.services.config import Settings
    from baton.services.leave import leave

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

        if loaded.engine.tensor_parallel_size > 1:
            fork_ranks()
        if unique:
            loaded.worker.worker_id += f".{os.getpid()}"
        run_worker(loaded, kind)
