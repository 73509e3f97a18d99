"""The number of training threads on a machine with other load."""

from __future__ import annotations

import time

import psutil


class SpareThreads:
    """A choice of as many threads as other processes leave cores free, from one to `most`.

    Threads of one operation wait for each other: with two of them at low priority and one of two cores
    taken, the free core mostly waits. Measured then, model not compiled: 1.0k tokens/s with two threads,
    3.0k with one.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._process = psutil.Process()
        self._mark = self._times()

    def count(self) -> int:
        """Return the threads for the next step, by the load of others since the last call."""
        before, self._mark = self._mark, self._times()
        elapsed = max(self._mark[0] - before[0], 1e-3)
        others = (self._mark[1] - before[1]) / elapsed
        return max(1, min(self._most, round((psutil.cpu_count() or 1) - others + 0.1)))

    def _times(self) -> tuple[float, float]:
        """Return the time, and the CPU seconds that all other processes have used so far."""
        total, own = psutil.cpu_times(), self._process.cpu_times()
        busy = sum(total) - total.idle - total.iowait - total.guest - total.guest_nice
        return time.monotonic(), busy - own.user - own.system
