"""The parts of a deployment, each run by a forked process. See harness/zygote.py."""

from __future__ import annotations

import os
import sys
from typing import Any

from harness.poison import FOLDER

WORKER_KINDS = ("prefill", "decode", "mixed")


def run(kind: str, settings: dict[str, Any], poison: bool = False) -> None:
    """Run a scheduler, a router or a worker until it ends. poison: load the plug-in of harness/poison."""
    if poison:
        sys.path.insert(0, str(FOLDER))
    from baton.services.config import Settings, load

    loaded = load(settings, tree=Settings)
    if loaded.worker.worker_id:
        loaded.worker.worker_id += f".{os.getpid()}"  # as `baton up` does: restarts share a name
    if kind == "scheduler":
        from baton.services.fleet.scheduler import run_scheduler

        run_scheduler(loaded)
    elif kind == "router":
        from baton.services.leave import leave
        from baton.services.router.app import run_router

        run_router(loaded)
        leave(0)
    else:
        from baton.services.worker.lifecycle import run_worker

        run_worker(loaded, kind)
