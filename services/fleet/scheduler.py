"""Run the scheduler: read the configuration and secrets, then serve until a signal."""

from __future__ import annotations

import uvloop

from baton.scheduler.service import serve
from baton.security.names import Role
from baton.services import credentials, identities, logs
from baton.services.config import Settings
from baton.services.fleet.goals import goals_of
from baton.services.imports import collect_seldom


def run_scheduler(settings: Settings) -> None:
    """Serve placements until SIGTERM or SIGINT.

    Raises BatonError if the port is taken, or if the store's URL, password or password file is wrong. While
    the store does not answer, placing continues, and drains are remembered here alone.
    """
    logs.configure(settings.log_format, "scheduler")
    own = settings.scheduler
    own.check_shared()
    password = credentials.store_password(own)
    identities.take_on(settings, Role.SCHEDULER)
    goals = goals_of(settings)
    collect_seldom()
    uvloop.run(serve(own, store_password=password, metrics_port=own.metrics_port, goals=goals))
