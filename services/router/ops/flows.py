"""KV moved from prefill to decode workers, by pair, over the last ten seconds."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from baton.services.router.record import Record

WINDOW_S = 10.0
MOST_PAIRS = 200  # the busiest ones, in one message
_PART_S = 1.0
_MIB = 1 << 20

Pair = tuple[str, str]  # prefill worker, decode worker; the same one if it did both


@dataclass(slots=True)
class _Part:
    since: float
    requests: Counter[Pair] = field(default_factory=Counter)
    moved: Counter[Pair] = field(default_factory=Counter)  # bytes


class Flows:
    """Sums by pair and second; memory is bounded by the pairs used in the window."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._parts: deque[_Part] = deque()

    def add(self, record: Record) -> None:
        """Count a finished request for the workers of its last attempt."""
        if not record.attempts:
            return
        now = self._clock()
        if not self._parts or now >= self._parts[-1].since + _PART_S:
            self._forget(now)
            self._parts.append(_Part(now))
        last = record.attempts[-1]
        pair = last.prefill_worker or last.decode_worker, last.decode_worker
        self._parts[-1].requests[pair] += 1
        moved = sum(stage.attributes.get("bytes", 0) for stage in record.later if stage.name == "handoff")
        self._parts[-1].moved[pair] += moved

    def rows(self) -> list[list[Any]]:
        """Return [prefill worker, decode worker, requests/s, MiB/s] for each pair, the busiest first."""
        self._forget(self._clock())
        requests: Counter[Pair] = Counter()
        moved: Counter[Pair] = Counter()
        for part in self._parts:
            requests.update(part.requests)
            moved.update(part.moved)
        return [
            [*pair, round(requests[pair] / WINDOW_S, 2), round(moved[pair] / WINDOW_S / _MIB, 2)]
            for pair, _ in requests.most_common(MOST_PAIRS)
        ]

    def _forget(self, now: float) -> None:
        while self._parts and self._parts[0].since <= now - WINDOW_S:
            self._parts.popleft()
