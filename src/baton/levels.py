"""Change log levels in a running process, as an operator asks."""

from __future__ import annotations

import logging

LEVELS = ("debug", "info", "warning", "error")
OWN = "baton"  # the logger above all of Baton's
REQUESTS = "baton.requests"  # the router's line for each request, which router.log_level turns on

logger = logging.getLogger(__name__)


def set_level(name: str) -> None:
    """Show this process's own lines from that level on; "" and the current level change nothing.

    Raises ValueError for another name. Lines of libraries stay as the environment says.
    """
    if not name:
        return
    if name not in LEVELS:
        raise ValueError(f"{name!r} is no log level: use {', '.join(LEVELS)}")
    level = logging.getLevelNamesMapping()[name.upper()]
    loggers = [logging.getLogger(OWN), logging.getLogger(REQUESTS)]
    if all(one.level == level for one in loggers):
        return
    for one in loggers:
        one.setLevel(level)
    logger.log(max(level, logging.WARNING), "the log level is %s now, as an operator asked", name)
