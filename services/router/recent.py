"""Keep the last and the slowest finished requests for the live page, in bounded memory."""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import count

from baton.services.router.record import Record

LAST = 200
SLOWEST = 50
WINDOW_S = 900.0
_PART_S = 60.0  # the slowest are kept per minute and expire with it


class Recent:
    """Records of finished requests. Not thread-safe."""

    def __init__(
        self, last: int = LAST, slowest: int = SLOWEST, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Keep the `last` records, and the `slowest` of each of the last 15 minutes."""
        self._clock = clock
        self._last: deque[Record] = deque(maxlen=last)
        self._most = slowest
        # One heap per minute, the fastest record first; the number breaks ties.
        self._slow: deque[tuple[float, list[tuple[float, int, Record]]]] = deque()
        self._numbers = count()

    def add(self, record: Record) -> None:
        """Add a record; a few comparisons unless it is among the slowest."""
        self._last.append(record)
        now = self._clock()
        self._forget(now)
        if not self._slow or now >= self._slow[-1][0] + _PART_S:
            self._slow.append((now, []))
        heap = self._slow[-1][1]
        entry = (record.slowness_s, next(self._numbers), record)
        if len(heap) < self._most:
            heapq.heappush(heap, entry)
        elif entry[0] > heap[0][0]:
            heapq.heapreplace(heap, entry)

    def last(self, n: int = LAST) -> list[Record]:
        """Return the last `n` requests, the latest first."""
        found = list(self._last)[::-1]
        return found[:n]

    def slowest(self, n: int = SLOWEST) -> list[Record]:
        """Return the `n` slowest requests of the last 15 minutes, the slowest first."""
        self._forget(self._clock())
        entries = heapq.nlargest(min(n, self._most), (entry for _, heap in self._slow for entry in heap))
        return [record for _, _, record in entries]

    def find(self, request_id: str) -> Record | None:
        """Return the latest record with this request or response id."""
        kept: Iterator[Record] = (
            one
            for records in (self.last(), self.slowest())
            for one in records
            if request_id in (one.request_id, one.response_id)
        )
        return next(kept, None)

    def _forget(self, now: float) -> None:
        while self._slow and self._slow[0][0] < now - WINDOW_S:
            self._slow.popleft()
