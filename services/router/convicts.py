"""Refuse repeats of requests under which an engine failed while it ran nothing else.

Each router process has its own table, in memory.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable

from baton.services.router.errors import Convicted

log = logging.getLogger(__name__)

LIMIT = 1024  # entries; the oldest is dropped
KEPT_S = 600.0


def _digest(engine_request: bytes) -> bytes:
    return hashlib.sha256(engine_request).digest()


class Convicts:
    """Digests of refused requests."""

    def __init__(
        self,
        digest: Callable[[bytes], bytes] = _digest,
        shape: Callable[[bytes], str] = lambda _: "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """digest: equal for equal requests; shape: describes a request in the log without its content."""
        self._digest = digest
        self._shape = shape
        self._clock = clock
        self._until: OrderedDict[bytes, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._until)

    def add(self, request_id: str, engine_request: bytes, why: str) -> None:
        """Refuse this request for a while."""
        shape = self._shape(engine_request)
        log.error(
            "request %s failed an engine alone: %s; %s",
            request_id,
            why,
            shape,
            extra={"request_id": request_id},
        )
        digest = self._digest(engine_request)
        self._until[digest] = self._clock() + KEPT_S
        self._until.move_to_end(digest)
        while len(self._until) > LIMIT:
            self._until.popitem(last=False)

    def check(self, engine_request: bytes) -> None:
        """Raise Convicted for a repeat. Costs nothing while the table is empty."""
        if not self._until:
            return
        now = self._clock()
        while self._until:
            oldest = next(iter(self._until))
            if self._until[oldest] > now:
                break
            del self._until[oldest]
        until = self._until.get(self._digest(engine_request))
        if until is not None:
            raise Convicted(
                "the same request made an engine fail a short while ago, alone: it is not tried again for "
                f"{until - now:.0f} s; change the request, or ask the operator to look into the router's log",
                retry_after_s=until - now,
            )
