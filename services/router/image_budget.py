"""Limit the memory of prepared images of waiting and running requests, apart from the journal of their text.

So images never make text wait. A tenant, or a client if there are no tenants, may hold half of the
budget.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.services.engine.images import MOST_BYTES
from baton.services.router.errors import NotAdmitted, Why
from baton.services.router.images import Image, Images

BUDGET_BYTES = 4 * MOST_BYTES
_RETRY_AFTER_S = 1.0


def budget_bytes(processes: int) -> int:
    """Return the budget of one of a router's processes: half of it must be enough for one request."""
    return max(2 * MOST_BYTES, BUDGET_BYTES // processes)


class ImageBudget:
    """The images of the requests in a journal. Each counts once, and once for each of its holders."""

    def __init__(self, limit: int = BUDGET_BYTES) -> None:
        """limit: bytes."""
        self.limit = limit
        self._all = Images()
        self._held: dict[str, tuple[Images, int]] = {}  # keyed by holder; with its requests

    @property
    def size(self) -> int:
        return self._all.size

    def check(self, images: Sequence[Image], holder: str) -> None:
        """Check that there is room for a request's images. Raises NotAdmitted (503).

        `holder`: "" for requests without a known sender.
        """
        if not images:
            return
        held, _ = self._held.get(holder, (Images(), 0))
        if (wanted := self.size + self._all.more(images)) > self.limit:
            raise _full(f"the images of all requests would take {_mib(wanted)} of {_mib(self.limit)}")
        half = self.limit // 2
        if holder and (wanted := held.size + held.more(images)) > half:
            raise _full(f"your requests' images would take {_mib(wanted)}; {_mib(half)} are yours")

    def enter(self, images: Sequence[Image], holder: str) -> None:
        """Count a request's images. Raises like `check`."""
        self.check(images, holder)
        if not images:
            return
        held, requests = self._held.get(holder, (Images(), 0))
        self._all.enter(images)
        held.enter(images)
        self._held[holder] = held, requests + 1

    def leave(self, images: Sequence[Image], holder: str) -> None:
        if not images:
            return
        self._all.leave(images)
        held, requests = self._held.pop(holder)
        held.leave(images)
        if requests > 1:
            self._held[holder] = held, requests - 1


def _full(why: str) -> NotAdmitted:
    text = f"the router has no room for more images now: {why} (docs/images.md). Requests without images run"
    return NotAdmitted(text, Why.JOURNAL, _RETRY_AFTER_S)


def _mib(size: int) -> str:
    return f"{size / (1 << 20):.1f} MiB"
