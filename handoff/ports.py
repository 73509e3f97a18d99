"""The KV ports: each rank has two, one for calls and the next one for records.

`handoff.port` is rank 0's first port, and the other ranks' follow; 0 picks free ports for all.
"""

from __future__ import annotations


def first(port: int, rank: int) -> int:
    """Return a rank's first port, given rank 0's `port`; 0: a free port."""
    return port and port + 2 * rank


def for_records(port: int) -> int:
    """Return a rank's port for records, given its first `port`; 0: a free port."""
    return port and port + 1


def of_worker(port: int, ranks: int) -> range:
    """Return all ports of a worker, given rank 0's first `port`; none if they are free ports."""
    return range(port, port + 2 * ranks) if port else range(0)
