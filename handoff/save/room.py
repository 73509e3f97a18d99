"""Which prompts may be begun: those for whose KV there will be room when they have been read.

A prompt that is read for nothing is read once more on the other side, among the streams that are written
there. So it waits, for a short while; then whoever asked is told, and may ask elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

WAIT_S = 3.0  # some pulls of long prompts; a router that is told so has others to ask


class SaveRoom:
    """Staging as the scheduler's side knows it. On the engine's thread.

    Invariant: a request is promised room, waits for it, or is unknown.
    """

    def __init__(self, wait_s: float = WAIT_S) -> None:
        self._wait_s = wait_s
        self._staging: Mapping[int, tuple[int, int]] = {}  # by rank: blocks that are free, and all
        self._promised: dict[str, int] = {}  # by request id: blocks
        self._waiting: dict[str, tuple[int, float]] = {}  # blocks, until when; the first come first
        self._overdue: list[str] = []

    def hear(self, staging: Mapping[int, tuple[int, int]]) -> None:
        """What ranks say after a step."""
        self._staging = {**self._staging, **staging}

    def admits(self, request_id: str, blocks: int) -> bool:
        """Whether a request may be begun that will save so many blocks.

        One that waited for too long may, too: `take_overdue` names it first.
        """
        if request_id in self._promised:
            return True
        now = time.monotonic()
        _, until = self._waiting.setdefault(request_id, (blocks, now + self._wait_s))
        if self._fits(request_id, blocks):
            del self._waiting[request_id]
            self._promised[request_id] = blocks
            return True
        if now >= until:
            del self._waiting[request_id]
            self._promised[request_id] = 0
            self._overdue.append(request_id)
        return False

    def take_overdue(self) -> list[str]:
        """Requests that have waited for too long, each once."""
        overdue, self._overdue = self._overdue, []
        return overdue

    def forget(self, request_id: str) -> None:
        """It is saved, or over."""
        self._promised.pop(request_id, None)
        self._waiting.pop(request_id, None)
        if request_id in self._overdue:
            self._overdue.remove(request_id)

    def _fits(self, request_id: str, blocks: int) -> bool:
        free = min((free for free, _ in self._staging.values()), default=blocks)
        capacity = min((capacity for _, capacity in self._staging.values()), default=blocks)
        if blocks > capacity:
            return True  # it never will, anywhere here: its answer's worker reads it
        ahead = 0
        for other, (others, _) in self._waiting.items():
            if other == request_id:
                break
            ahead += others
        return sum(self._promised.values()) + ahead + blocks <= free
