"""The ports of KV: each rank has two, the first for calls and the next one for records.

`handoff.port` is the first one of rank 0, and those of the others follow; 0: all are free ones.
"""

from __future__ import annotations


def first(port: int, rank: int) -> int:
    """Return a rank's first port, where `port` is rank 0's; 0: a free one."""
    return port and port + 2 * rank


def for_records(port: int) -> int:
    """Return a rank's second port, where `port` is its first; 0: a free one."""
    return port and port + 1


def of_worker(port: int, ranks: int) -> range:
    """Return all ports of a worker, where `port` is rank 0's first; none if they are free ones."""
    return range(port, port + 2 * ranks) if port else range(0)
