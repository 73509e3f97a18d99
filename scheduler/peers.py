"""Tell each worker the best draft acceptance that another worker with its speculative method reports."""

from __future__ import annotations

import time
from collections.abc import Callable

from baton.scheduler.types import FleetView

PEERS_AGE_S = 5.0  # references change slowly


class Peers:
    """The two best references of each speculative method, refreshed every `PEERS_AGE_S`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._looked = -PEERS_AGE_S
        self._methods: dict[str, str] = {}  # worker id -> method
        self._best: dict[str, list[tuple[float, str]]] = {}  # method -> (reference, worker id), best first

    def reference(self, worker_id: str, view: FleetView) -> float:
        """Return the best reference of the other workers with this worker's method; 0: none."""
        now = self._clock()
        if now - self._looked >= PEERS_AGE_S or worker_id not in self._methods:
            self._looked = now
            self._look(view)
        best = self._best.get(self._methods.get(worker_id, ""), ())
        return next((reference for reference, other in best if other != worker_id), 0.0)

    def _look(self, view: FleetView) -> None:
        self._methods = {key: one.capacity.speculative_method for key, one in view.workers.items()}
        found: dict[str, list[tuple[float, str]]] = {}
        for key, worker in view.workers.items():
            if worker.load is not None:
                reference = worker.load.drafting.learned_reference
                found.setdefault(self._methods[key], []).append((reference, key))
        self._best = {method: sorted(all_of_it, reverse=True)[:2] for method, all_of_it in found.items()}
