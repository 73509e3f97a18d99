"""The log of a worker's prefix cache: numbered operations, which the worker sends to schedulers.

Operations are kept until acknowledged. If a scheduler lacks operations that are no longer kept, its log
begins again with a later `instance` and the whole content of the cache. Each scheduler has its own log
(`BlockLogs`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.prefix_keys import REMOVED
from baton.protos import scheduler_pb2 as pb

MOST = 131_072  # operations kept
PIECE = 4_096  # operations per message: 32 KiB, some 1 ms of the scheduler's time


@dataclass(frozen=True, slots=True)
class Change:
    """Keys of the blocks that a cache evicted and stored; no key is in both."""

    cleared: bool = False  # the cache was emptied first
    removed: Sequence[int] = ()
    stored: Sequence[int] = ()


class BlockLog:
    """The log for one scheduler. Belongs to one event loop."""

    def __init__(self, now_ns: Callable[[], int] = time.time_ns, held: set[int] | None = None) -> None:
        """Begin a log; `held` is shared with other schedulers' logs, and updated by their owner."""
        self._now_ns = now_ns
        self._held = set() if held is None else held
        self._instance = now_ns()
        self._first = 0  # number of the first operation kept
        self._operations: list[int] = list(self._held)
        self._lost = False  # too many operations: the log must begin again

    def __len__(self) -> int:
        return len(self._held)

    @property
    def behind(self) -> bool:
        """Whether the scheduler lacks more operations than one message holds."""
        return self._lost or len(self._operations) > PIECE

    def take(self, change: Change) -> None:
        """Record changes of a cache with only this log."""
        self.note(_applied(self._held, change), cleared=change.cleared)

    def note(self, operations: Sequence[int], *, cleared: bool) -> None:
        """Record operations already applied to `held`."""
        if cleared:
            self._begin_again()
        elif not self._lost:
            self._operations += operations
            if len(self._operations) > max(MOST, 2 * len(self._held)):
                self._operations, self._lost = [], True

    def message(self) -> pb.BlockOperations:
        """Return the first operations that the scheduler does not have yet."""
        if self._lost:
            self._begin_again()
        return pb.BlockOperations(
            instance=self._instance, first=self._first, operations=self._operations[:PIECE]
        )

    def heard(self, known: pb.BlocksKnown) -> None:
        end = self._first + len(self._operations)
        if known.instance == self._instance and self._first <= known.operations <= end:
            del self._operations[: known.operations - self._first]
            self._first = known.operations
        elif self._first or known.instance >= self._instance:
            # The scheduler lacks operations that are no longer kept, or knows a later instance from an
            # earlier process with a fast clock.
            self._instance = max(self._instance, known.instance)
            self._begin_again()

    def _begin_again(self) -> None:
        self._instance = max(self._instance + 1, self._now_ns())
        self._first = 0
        self._operations = list(self._held)
        self._lost = False


class BlockLogs:
    """One worker's logs for all schedulers. They share the set of cached blocks."""

    def __init__(self, now_ns: Callable[[], int] = time.time_ns) -> None:
        self._now_ns = now_ns
        self._held: set[int] = set()
        self._logs: dict[str, BlockLog] = {}

    def to(self, scheduler: str) -> BlockLog:
        log = self._logs.get(scheduler)
        if log is None:
            log = self._logs[scheduler] = BlockLog(self._now_ns, self._held)
        return log

    def take(self, change: Change) -> None:
        operations = _applied(self._held, change)
        for log in self._logs.values():
            log.note(operations, cleared=change.cleared)


def _applied(held: set[int], change: Change) -> list[int]:
    """Apply a change to `held`, and return its operations without the clearing."""
    if change.cleared:
        held.clear()
    removed = [key for key in change.removed if key in held]
    held.difference_update(removed)
    stored = [key for key in dict.fromkeys(change.stored) if key not in held]
    held.update(stored)
    return [key | REMOVED for key in removed] + stored
