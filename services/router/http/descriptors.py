"""Limits connections to the available file descriptors."""

from __future__ import annotations

import logging
import resource

log = logging.getLogger(__name__)

# Connections above the limit that may wait for their 503. Any further one is dropped to save descriptors.
SPARE_CONNECTIONS = 256
OWN_DESCRIPTORS = 512  # reserved for workers, scheduler and files


def affordable_connections(wanted: int) -> int:
    """Raise the limit of file descriptors if needed; return how many of the `wanted` connections it allows.

    Without a free descriptor the router could neither accept clients nor reach workers.
    """
    beside = SPARE_CONNECTIONS + OWN_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted + beside:
        soft = min(wanted + beside, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    fits = max(1, min(wanted, soft - beside))
    if fits < wanted:
        log.warning(
            "router.max_connections is %d, but %d file descriptors (ulimit -n) allow only %d connections",
            wanted,
            soft,
            fits,
        )
    return fits
