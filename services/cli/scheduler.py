"""`baton scheduler`."""

from __future__ import annotations

import asyncio

from baton.scheduler.service import serve
from baton.services.config import Settings


def run_scheduler(settings: Settings) -> None:
    """Serve placements until SIGTERM or SIGINT.

    Raises BatonError, one line: the port is taken, the store does not answer or refuses the password.
    """
    asyncio.run(serve(settings.scheduler))
