"""Admission of prompts to a prefill: only those whose KV will find room in staging.

A prompt prefilled without room is prefilled once more by the decode worker, among the streams that it
decodes. So it waits, for a short while; then its router learns that there is no room, and may try another
worker.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

WAIT_S = 3.0  # time for some pulls of long prompts; a router that learns of it has other workers


class SaveRoom:
    """Staging's room as the scheduler's side knows it. Used on the engine's thread.

    Invariant: a request is promised room, waits for it, or is unknown.
    """

    def __init__(self, wait_s: float = WAIT_S) -> None:
        self._wait_s = wait_s
        self._staging: Mapping[int, tuple[int, int]] = {}  # by rank: free blocks, and all blocks
        self._promised: dict[str, int] = {}  # by request id: blocks
        self._waiting: dict[str, tuple[int, float]] = {}  # blocks, until when; first come, first served
        self._overdue: list[str] = []

    def hear(self, staging: Mapping[int, tuple[int, int]]) -> None:
        """Take over what ranks report after a step: free blocks and all, by rank."""
        self._staging = {**self._staging, **staging}

    def admits(self, request_id: str, blocks: int) -> bool:
        """Return whether a request that will save so many blocks may be prefilled now.

        A request that has waited for too long may, too: `take_overdue` names it first.
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

    def promised(self, request_id: str) -> bool:
        """Return whether all that the request will save is promised room."""
        return self._promised.get(request_id, 0) > 0

    def kept(self, request_id: str) -> None:
        """Note that a promised request has its room, before it is complete: that is not free any more."""
        if request_id in self._promised:
            self._promised[request_id] = 0

    def take_overdue(self) -> list[str]:
        """Return the requests that have waited for too long, each once."""
        overdue, self._overdue = self._overdue, []
        return overdue

    def forget(self, request_id: str) -> None:
        """Drop a request that is saved, or over."""
        self._promised.pop(request_id, None)
        self._waiting.pop(request_id, None)
        if request_id in self._overdue:
            self._overdue.remove(request_id)

    def _fits(self, request_id: str, blocks: int) -> bool:
        free = min((free for free, _ in self._staging.values()), default=blocks)
        capacity = min((capacity for _, capacity in self._staging.values()), default=blocks)
        if blocks > capacity:
            return True  # it never will fit here: the decode worker prefills it
        ahead = 0
        for other, (others, _) in self._waiting.items():
            if other == request_id:
                break
            ahead += others
        return sum(self._promised.values()) + ahead + blocks <= free
