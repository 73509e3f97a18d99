"""Run a router as several processes on one port (router.processes): fork them, restart those that die.

This process imports vLLM once, listens, and holds the port open for them. It serves nothing itself and stays
free of threads and gRPC, because it may fork at any time.
"""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Sequence
from functools import partial

from baton.security.names import Role
from baton.services import identities
from baton.services.config import RouterSettings, Settings
from baton.services.errors import ConfigError, StartError
from baton.services.fleet.parts import Kind, Parts
from baton.services.fleet.processes import Child
from baton.services.fleet.signals import wake_on_signals
from baton.services.leave import leave, leave_on_signals
from baton.services.models import Model, models_of
from baton.services.router import app

log = logging.getLogger(__name__)


def run_routers(settings: Settings, models: Sequence[Model] | None = None) -> None:
    """Serve OpenAI's API for `models` (those of the settings if None) in router.processes processes.

    Runs until SIGTERM or SIGINT. Raises like `run_router`, and StartError if every process died too often.
    """
    models = models or models_of(settings)
    if settings.router.processes == 1:
        app.run_router(settings, models)
        return
    if settings.security.folder:
        raise ConfigError("security.folder is for one process: leave it out, or set router.processes to 1")
    with app.opened(settings, models, settings.router.processes) as router:
        leave_on_signals(0)  # importing takes seconds, and nothing is forked yet
        app.preload()
        _run(settings, models, router)


def share(router: RouterSettings, number: int) -> RouterSettings:
    """Return the settings of process `number`, with its share of the waiting requests."""
    waiting = (router.max_waiting + number) // router.processes
    port = router.metrics_port and router.metrics_port + number
    return router.model_copy(update={"max_waiting": waiting, "metrics_port": port})


def _run(settings: Settings, models: Sequence[Model], router: app.Opened) -> None:
    """Run all processes until a signal. Raises StartError when none is left."""
    parts = Parts(None, lambda name, text: log.warning("%s %s", name, text), whole=False)
    stop = wake_on_signals()
    try:
        for number in range(len(router.group)):
            parts.add(f"router-{number}", Kind.ROUTER, partial(_serve, settings, models, router, number))
        while stop not in parts.wait([stop]):
            parts.reap()
            if all(part.given_up for part in parts.members):
                raise StartError("router.processes: each died too often; see their output")
    finally:
        _end(settings, parts, router)


def _end(settings: Settings, parts: Parts, router: app.Opened) -> None:
    """End all processes. Each finishes its streams, and closes its socket once no client waits on it."""
    router.group.end()
    pairs = zip(parts.members, router.group.sockets, strict=False)
    sockets = {part.name: sock for part, sock in pairs}

    def close(child: Child) -> None:
        """Close the socket of a process that died before doing so: clients would wait on it."""
        with contextlib.suppress(OSError):  # the process closed it
            sockets[child.name].shutdown(socket.SHUT_RDWR)

    parts.stop(settings.router.drain_timeout_s, ended=close)


def _serve(settings: Settings, models: Sequence[Model], router: app.Opened, number: int) -> None:

    def own(whole: Settings) -> Settings:
        return whole.model_copy(update={"router": share(whole.router, number)})

    app.log_as(settings, f"router-{number}")
    identities.take_on(settings, Role.ROUTER)
    app.serve(own(settings), [one.with_settings(own) for one in models], router, number)
    leave(0)
