"""Entry points of a supervisor's child processes, which are forks (see `preload`) or new programs.

Imports are late because a supervisor of schedulers alone needs no vLLM. Everything can be pickled, to be sent
to a new program.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

from baton import addresses
from baton.services import logs
from baton.services.config import Settings
from baton.services.fleet import ports
from baton.services.fleet.devices import Devices
from baton.services.leave import leave
from baton.services.models import Model


def preload(settings: Settings, process: str, *, workers: bool = True, routers: bool = True) -> None:
    """Import what workers and routers need, before they are forked. `process` is for the log."""
    # Libraries' warnings stay off: vLLM repeats those about this machine in each engine's log.
    logs.configure(settings.log_format, process)
    if workers:
        from baton.services.worker import lifecycle

        lifecycle.preload()
    if routers:
        from baton.services.router import app

        app.preload()


@dataclass(frozen=True)
class Worker:
    """Runs a worker on its share of the machine. Its role is looked up at each start, as it may change."""

    settings: Settings
    name: str
    role: Callable[[], str]
    where: Devices

    def __call__(self) -> None:
        from baton.services.worker.lifecycle import run_worker

        logs.keep_warnings()
        os.environ.update(self.where.environment)
        own = self.settings.model_copy(deep=True)
        own.worker.cpu = self.where.cpu
        own.worker.worker_id = f"{self.name}.{os.getpid()}"
        run_worker(own, self.role())

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the current role, because only the supervisor can look it up."""
        return Worker, (self.settings, self.name, partial(str, self.role()), self.where)


def scheduler(settings: Settings) -> None:
    from baton.services.fleet.scheduler import run_scheduler

    logs.configure(settings.log_format, "scheduler")
    with contextlib.suppress(ValueError):  # an address without a port, which is reported below
        ports.await_free(*addresses.split(settings.scheduler.address))
    run_scheduler(settings)


def router(settings: Settings, models: Sequence[Model] | None = None) -> NoReturn:
    """Run a router for `models` (those of the settings if None) until a signal."""
    from baton.services.fleet.routers import run_routers

    logs.keep_warnings()
    logs.configure(settings.log_format, "router")
    ports.await_free(settings.router.host, settings.router.port)
    run_routers(settings, models)
    leave(0)
