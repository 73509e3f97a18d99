"""Admit prompts to a prefill only if their KV will find room in staging.

A prompt prefilled without room would be prefilled once more by the decode worker, among the streams that it
decodes. So it waits, for a short while; then its router learns that there is no room, and may try another
worker.

A prompt that would take most of staging gets a window of it instead, and may keep blocks of the engine's
cache until they are pulled. These are bounded, too: other prompts go on in the other half of the cache.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from baton.handoff import windows

KEPT_SHARE = 2  # 1/n of the engine's cache that such prompts may keep; a single one may keep more
WAIT_S = 3.0  # enough for some pulls of long prompts; after it, the router may choose another worker


class SaveRoom:
    """Track staging's room for the scheduler's side. Used on the engine's thread.

    Invariant: a request is promised room, waits for it, or is unknown.
    """

    def __init__(self, cache_blocks: int, wait_s: float = WAIT_S) -> None:
        """Start without ranks. cache_blocks: size of the engine's cache."""
        self.windows = True  # whether the ranks' transports move saves with fewer slots than records
        self._keepable = cache_blocks // KEPT_SHARE
        self._keeping: dict[str, int] = {}  # request id -> blocks beyond the window, until `freed`
        self._wait_s = wait_s
        self._staging: Mapping[int, tuple[int, int]] = {}  # rank -> (free blocks, all blocks)
        self._promised: dict[str, int] = {}  # request id -> slots
        self._waiting: dict[str, tuple[int, float]] = {}  # slots, deadline; first come, first served
        self._overdue: list[str] = []

    def hear(self, staging: Mapping[int, tuple[int, int]]) -> None:
        """Take the ranks' reports after a step: free and total blocks, by rank."""
        self._staging = {**self._staging, **staging}

    def slots(self, blocks: int) -> int:
        """Return how many slots a save of `blocks` blocks gets: one for each, or a window."""
        capacity = min((capacity for _, capacity in self._staging.values()), default=0)
        return windows.slots_for(blocks, capacity) if self.windows and capacity else blocks

    def admits(self, request_id: str, blocks: int, slots: int) -> bool:
        """Return whether a request that will save `blocks` blocks in `slots` slots may be prefilled now.

        A request that has waited for too long may, too: `take_overdue` names it first.
        """
        if request_id in self._promised:
            return True
        now = time.monotonic()
        _, until = self._waiting.setdefault(request_id, (slots, now + self._wait_s))
        if self._fits(request_id, slots) and self._may_keep(blocks - slots):
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
        """Return whether room is promised for everything that the request will save."""
        return self._promised.get(request_id, 0) > 0

    def kept(self, request_id: str) -> None:
        """Note that a promised request already took its room, so that it no longer counts as free."""
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

    def freed(self, request_id: str) -> None:
        """Note that the engine's blocks of a request are no longer kept."""
        self._keeping.pop(request_id, None)

    def _may_keep(self, blocks: int) -> bool:
        return not (blocks and self._keeping) or sum(self._keeping.values()) + blocks <= self._keepable

    def _fits(self, request_id: str, slots: int) -> bool:
        free = min((free for free, _ in self._staging.values()), default=slots)
        capacity = min((capacity for _, capacity in self._staging.values()), default=slots)
        if slots > capacity:
            return True  # it will never fit here: the decode worker prefills it
        ahead = 0
        for other, (others, _) in self._waiting.items():
            if other == request_id:
                break
            ahead += others
        return sum(self._promised.values()) + ahead + slots <= free
