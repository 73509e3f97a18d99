"""Admission of prompts by room in staging.

If a prompt were prefilled without room to save its KV, the decode worker would prefill it again. So it waits
for a short while; after that the router may try another worker. A prompt that would take most of staging gets
a window, and keeps blocks of the engine's cache until they are pulled; such prompts may keep half of the
cache.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from baton.handoff import windows

KEPT_SHARE = 2  # windowed prompts together may keep 1/KEPT_SHARE of the engine's cache, one alone more
WAIT_S = 3.0  # enough for a few pulls of long prompts


class SaveRoom:
    """Promise room in staging. Used on the engine's thread.

    Invariant: a request is promised room, waits for it, or is unknown.
    """

    def __init__(self, cache_blocks: int, wait_s: float = WAIT_S) -> None:
        """cache_blocks: size of the engine's cache."""
        self.windows = True  # whether all ranks have a transport that supports windows
        self._keepable = cache_blocks // KEPT_SHARE
        self._keeping: dict[str, int] = {}  # request id -> blocks beyond the window, until `freed`
        self._wait_s = wait_s
        self._staging: Mapping[int, tuple[int, int]] = {}  # rank -> (free blocks, all blocks)
        self._promised: dict[str, int] = {}  # request id -> slots
        self._waiting: dict[str, tuple[int, float]] = {}  # request id -> (slots, deadline), FIFO
        self._overdue: list[str] = []

    def hear(self, staging: Mapping[int, tuple[int, int]]) -> None:
        """Update from the ranks' reports: free and total blocks, by rank."""
        self._staging = {**self._staging, **staging}

    def slots(self, blocks: int) -> int:
        capacity = min((capacity for _, capacity in self._staging.values()), default=0)
        return windows.slots_for(blocks, capacity) if self.windows and capacity else blocks

    def admits(self, request_id: str, blocks: int, slots: int) -> bool:
        """Return whether a request may be prefilled now; `take_overdue` returns it if it waits too long."""
        if request_id in self._promised:
            return True
        now = time.monotonic()
        _, until = self._waiting.setdefault(request_id, (slots, now + self._wait_s))
        if self._fits(request_id, slots) and (
            blocks == slots
            or not self._keeping
            or sum(self._keeping.values()) + blocks - slots <= self._keepable
        ):
            del self._waiting[request_id]
            self._promised[request_id] = slots
            if blocks > slots:
                self._keeping[request_id] = blocks - slots
            return True
        if now >= until:
            del self._waiting[request_id]
            self._promised[request_id] = 0
            self._overdue.append(request_id)
        return False

    def promised(self, request_id: str) -> bool:
        """Return whether a request has a promise that it has not used yet."""
        return self._promised.get(request_id, 0) > 0

    def kept(self, request_id: str) -> None:
        """Record that a request has allocated its slots, so that the promise no longer counts."""
        if request_id in self._promised:
            self._promised[request_id] = 0

    def take_overdue(self) -> list[str]:
        """Return the requests that waited too long, each once."""
        overdue, self._overdue = self._overdue, []
        return overdue

    def forget(self, request_id: str) -> None:
        self._promised.pop(request_id, None)
        self._waiting.pop(request_id, None)
        if request_id in self._overdue:
            self._overdue.remove(request_id)

    def freed(self, request_id: str) -> None:
        self._keeping.pop(request_id, None)

    def _fits(self, request_id: str, slots: int) -> bool:
        free = min((free for free, _ in self._staging.values()), default=slots)
        capacity = min((capacity for _, capacity in self._staging.values()), default=slots)
        if slots > capacity:
            return True  # it never fits: the save fails, and the decode worker prefills it again
        ahead = 0
        for other, (others, _) in self._waiting.items():
            if other == request_id:
                break
            ahead += others
        return sum(self._promised.values()) + ahead + slots <= free
