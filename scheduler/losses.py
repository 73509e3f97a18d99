"""Count workers that disappear without deregistering."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from baton.protos import scheduler_pb2 as pb
from baton.scheduler.metrics import Metrics, role_of
from baton.scheduler.types import FleetView

log = logging.getLogger(__name__)


class Losses:
    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._there: dict[str, pb.Role] = {}  # worker id -> role, as of the last look

    def look(self, view: FleetView, left: Iterable[str], *, unsure: bool) -> None:
        """Count the workers that are in the last view and not in this one.

        left: workers that deregistered. unsure: live workers may not have registered again yet, so losses are
        counted later.
        """
        there = {key: one.role for key, one in view.workers.items()}
        gone = {key: role for key, role in self._there.items() if key not in there and key not in set(left)}
        if unsure:
            self._there = {**gone, **there}
            return
        for key, role in gone.items():
            log.warning("lost the %s worker %s: it sent nothing for a lease", role_of(role), key)
        self._metrics.lost(gone.values())
        self._there = there
