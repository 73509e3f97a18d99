"""Drop departed workers from the prefix index, and log each worker that does not report its cache.

The scheduler's service and the simulator call this regularly. The index itself is kept and updated by
prefixes/prefix_ledger.py. Requests are placed on silent workers without regard to prefixes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from baton.scheduler.metrics import PrefixMetrics
from baton.scheduler.prefixes.prefix_ledger import PrefixLedger
from baton.scheduler.types import FleetView

LATE_S = 10.0  # s; a worker reports its blocks with its first heartbeats
SWEPT = 10_000  # index entries swept at a time, which takes some 2 ms
PIECES = 32  # limit per call of `tend`

log = logging.getLogger(__name__)


class Knowledge:
    def __init__(
        self, ledger: PrefixLedger, metrics: PrefixMetrics, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._ledger = ledger
        self._metrics = metrics
        self._clock = clock
        self._since: dict[str, float] = {}  # worker that does not report -> since when
        self._told: set[str] = set()

    def look(self, view: FleetView) -> None:
        """Forget departed workers, and log those that do not report. Called about twice a second."""
        self._ledger.keep({key: worker.role for key, worker in view.workers.items()})
        now = self._clock()
        unknown = [key for key, one in view.workers.items() if one.placeable and key not in self._ledger]
        self._since = {key: self._since.get(key, now) for key in unknown}
        self._told &= view.workers.keys()
        late = [key for key, since in self._since.items() if now - since >= LATE_S and key not in self._told]
        if late:
            self._told.update(late)
            log.warning(
                "these workers do not report their prefix caches, so requests are placed without regard to "
                "them (engine.enable_prefix_caching is off, or their logs say why): %s",
                ", ".join(sorted(late)),
            )
        self._metrics.seen(self._ledger, len(unknown))

    async def tend(self) -> None:
        """Sweep departed workers' blocks in pieces, letting other calls run in between."""
        for _ in range(PIECES):
            if not self._ledger.index.tend(SWEPT):
                return
            await asyncio.sleep(0)
