"""The order of several routers' requests where all workers are full: who has waited longest comes first.

Before that counts the priority of their classes: a request takes no place that one of a class before its own
could have.

Each router keeps its own queue, and asks at once when a reservation of its own ends. Without an order
between routers one with many running requests would take every place that comes free, while the requests
of one with none, which only asks now and then, would wait until their time is over.

The cost is one entry a router with waiting requests, and a look at each of them for a placement meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from baton.scheduler.types import Need

TOLERANCE_S = 1.0  # s; a younger request takes a place that would stand empty until the elder asks again
HEARD_S = 1.5  # s; routers ask once a second at least (RETRY_S of services/router/waiting.py)


@dataclass(frozen=True, slots=True)
class _Waiting:
    need: Need
    since: float  # on the clock
    heard: float  # on the clock

    def goes_before(self, need: Need, since: float) -> bool:
        """Return whether it comes first. One that was refused once may have left."""
        mine = self.need
        before = self.since < since if mine.priority == need.priority else mine.priority < need.priority
        return before and mine.waited_s > TOLERANCE_S

    def could_take(self, need: Need, worker_ids: set[str]) -> bool:
        """Return whether those workers would do for it, too."""
        mine = self.need
        return (
            worker_ids.isdisjoint(mine.exclude)
            and mine.vllm_version in ("", need.vllm_version)
            and mine.model_fingerprint in ("", need.model_fingerprint)
            and mine.adapter in (None, need.adapter)
        )


class RouterTurns:
    """The request of each router that was refused as all workers are full. For one scheduler's event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._waiting: dict[str, _Waiting] = {}

    def refused(self, need: Need) -> None:
        """Note that `need` found no room: its router will ask again."""
        now = self._clock()
        self._waiting[need.router_id] = _Waiting(need, now - need.waited_s, now)

    def placed(self, need: Need) -> None:
        """Note that `need` has its place."""
        self._waiting.pop(need.router_id, None)

    def elder(self, need: Need, worker_ids: set[str]) -> str:
        """Return the router whose request goes first and could take those workers; "" if none."""
        if not self._waiting:
            return ""
        now = self._clock()
        since = now - need.waited_s - TOLERANCE_S
        for router_id, other in list(self._waiting.items()):
            if other.heard < now - HEARD_S:
                del self._waiting[router_id]
            elif router_id == need.router_id or not other.goes_before(need, since):
                continue
            elif other.could_take(need, worker_ids):
                return router_id
        return ""
