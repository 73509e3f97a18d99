"""Counts of all that a scheduler loses sight of: workers that went without a word, and the store."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

from baton.protos import scheduler_pb2 as pb
from baton.scheduler.metrics import Metrics, role_of
from baton.scheduler.types import FleetView

log = logging.getLogger(__name__)


class Losses:
    """Compares each look at the deployment with the one before."""

    def __init__(self, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics = metrics
        self._clock = clock
        # Worker id -> its role and its lease's end, as of the last look that saw it.
        self._there: dict[str, tuple[pb.Role, float]] = {}
        self._store_away = False

    def look(self, view: FleetView, left: Iterable[str], *, unsure: bool, store_away: bool) -> None:
        """Take a look, with a fresh view.

        Who is gone before its lease is over has said goodbye, maybe to another scheduler. left: workers that
        did so to this one. unsure: workers may live of which this scheduler has not heard again
        yet. store_away: memory stands in for the store, and does not know all.
        """
        if store_away and not self._store_away:
            self._metrics.store_losses.inc()
        now = self._clock()
        there = {key: (one.role, now + one.lease_left_s) for key, one in view.workers.items()}
        before = {key: self._there[key] for key in self._there.keys() - set(left)}
        if store_away or self._store_away or unsure:
            there = {**before, **there}  # nobody is missed until all is known again
        gone = {key: role for key, (role, until) in before.items() if key not in there and until <= now}
        for key, role in gone.items():
            log.warning("lost the %s worker %s: it was not heard of for a lease", role_of(role), key)
        self._metrics.lost(gone.values())
        self._there, self._store_away = there, store_away
