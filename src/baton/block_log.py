"""A worker's side of prefix knowledge: changes of its cache, as numbered operations.

At most `MOST` operations are kept until the scheduler says that it has them. If the scheduler lacks
operations that are gone (another scheduler, a restarted one, too many operations while none answered), the
log begins again: with a later `instance`, and the whole content of the cache as its first operations. So a
snapshot is just a log from its beginning, and is sent in pieces like any other.

Each scheduler has its own log (`BlockLogs`): when one loses its state, the others are not affected.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.prefix_keys import REMOVED
from baton.protos import scheduler_pb2 as pb

MOST = 131_072  # operations kept; 8 bytes each on the wire
PIECE = 4_096  # per message: 32 KiB; some 1 ms of the scheduler


@dataclass(frozen=True, slots=True)
class Change:
    """List losses and gains of a cache, by block name; no block is in both."""

    cleared: bool = False  # everything was lost, before the rest
    removed: Sequence[int] = ()
    stored: Sequence[int] = ()


class BlockLog:
    """Log one worker's cache for one scheduler. Belongs to one event loop."""

    def __init__(self, now_ns: Callable[[], int] = time.time_ns, held: set[int] | None = None) -> None:
        """Begin a log; `held` is shared with the logs for other schedulers, and updated by their owner."""
        self._now_ns = now_ns
        self._held = set() if held is None else held
        self._instance = now_ns()
        self._first = 0  # the number of the first operation that is kept
        self._operations: list[int] = list(self._held)
        self._lost = False  # operations were dropped: the log must begin again

    def __len__(self) -> int:
        """Return the number of blocks in the cache."""
        return len(self._held)

    @property
    def behind(self) -> bool:
        """Whether the scheduler is missing more changes than fit in one message."""
        return self._lost or len(self._operations) > PIECE

    def take(self, change: Change) -> None:
        """Record changes of a cache that has only this log."""
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
        """Return the operations that the scheduler does not have yet, or the first piece of them."""
        if self._lost:
            self._begin_again()
        return pb.BlockOperations(
            instance=self._instance, first=self._first, operations=self._operations[:PIECE]
        )

    def heard(self, known: pb.BlocksKnown) -> None:
        """Take the scheduler's answer about what it has."""
        end = self._first + len(self._operations)
        if known.instance == self._instance and self._first <= known.operations <= end:
            del self._operations[: known.operations - self._first]
            self._first = known.operations
        elif self._first or known.instance >= self._instance:
            # It lacks dropped operations, or an earlier process of this name had its clock ahead.
            self._instance = max(self._instance, known.instance)
            self._begin_again()

    def _begin_again(self) -> None:
        self._instance = max(self._instance + 1, self._now_ns())
        self._first = 0
        self._operations = list(self._held)
        self._lost = False


class BlockLogs:
    """Keep one worker's logs, one for each scheduler. Belongs to one event loop.

    The names of the cache's blocks are kept once. A log that nobody takes, such as that of a dead scheduler,
    is dropped when it grows too long, and begins again.
    """

    def __init__(self, now_ns: Callable[[], int] = time.time_ns) -> None:
        self._now_ns = now_ns
        self._held: set[int] = set()
        self._logs: dict[str, BlockLog] = {}

    def to(self, scheduler: str) -> BlockLog:
        """Return the log for the scheduler at this address, creating it on first use."""
        log = self._logs.get(scheduler)
        if log is None:
            log = self._logs[scheduler] = BlockLog(self._now_ns, self._held)
        return log

    def take(self, change: Change) -> None:
        """Record changes in every log."""
        operations = _applied(self._held, change)
        for log in self._logs.values():
            log.note(operations, cleared=change.cleared)


def _applied(held: set[int], change: Change) -> list[int]:
    """Change `held`, and return the operations of that change, after any clearing."""
    if change.cleared:
        held.clear()
    removed = [key for key in change.removed if key in held]
    held.difference_update(removed)
    stored = [key for key in dict.fromkeys(change.stored) if key not in held]
    held.update(stored)
    return [key | REMOVED for key in removed] + stored
