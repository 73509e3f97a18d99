"""`baton scheduler`."""

from __future__ import annotations

import asyncio

from baton.scheduler.service import serve
from baton.services import credentials, logs
from baton.services.config import Settings


def run_scheduler(settings: Settings) -> None:
    """Serve placements until SIGTERM or SIGINT.

    Raises BatonError, one line: the port is taken, the store's name, its password or the file with it is
    wrong. A store that does not answer is gone on without, until it does.
    """
    logs.configure(settings.log_format, "scheduler")
    own = settings.scheduler
    own.check_shared()
    password = credentials.store_password(own)
    asyncio.run(serve(own, store_password=password, metrics_port=own.metrics_port))
