"""The KV ports. Each rank has two, one for calls and the next for records.

The port of `handoff.listen` is the first of rank 0; the other ranks follow. With 0, the system chooses all.
"""

from __future__ import annotations


def first(port: int, rank: int) -> int:
    """Return a rank's port for calls, given that of `handoff.listen`."""
    return port and port + 2 * rank


def for_records(port: int) -> int:
    """Return a rank's port for records, given its port for calls."""
    return port and port + 1


def of_worker(port: int, ranks: int) -> range:
    """Return all ports of a worker, given that of `handoff.listen`; none if the system chooses them."""
    return range(port, port + 2 * ranks) if port else range(0)
