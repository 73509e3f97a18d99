"""Change a running process's log level."""

from __future__ import annotations

import logging

LEVELS = ("debug", "info", "warning", "error")
OWN = "baton"  # the parent of all of Baton's loggers
REQUESTS = "baton.requests"  # a line per request; router.log_level turns it on

logger = logging.getLogger(__name__)


def set_level(name: str) -> None:
    """Set the level of Baton's own loggers; "" changes nothing. Raises ValueError for an unknown name."""
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
