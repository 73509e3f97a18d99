"""The scheduler as a process of its own: the configuration read, secrets fetched, served until a signal."""

from __future__ import annotations

import asyncio

from baton.scheduler.service import serve
from baton.services import credentials, logs
from baton.services.config import Settings


def run_scheduler(settings: Settings) -> None:
    """Serve placements until SIGTERM or SIGINT.

    Raises BatonError, one line, when the port is taken, or when the store's URL, its password or the file
    with the password is wrong. While the store does not answer, placements are kept in memory.
    """
    logs.configure(settings.log_format, "scheduler")
    own = settings.scheduler
    own.check_shared()
    password = credentials.store_password(own)
    asyncio.run(serve(own, store_password=password, metrics_port=own.metrics_port))
