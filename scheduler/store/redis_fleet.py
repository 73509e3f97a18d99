"""The workers as the Redis store's views have told of them, brought up to date by what changed since.

A view costs by what changed since the last one, but for a look at each worker's lease. Once in `WHOLE_S` all
is read: a server that evicts keys, as it should not, takes counts away that no change tells of.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from baton.protos import scheduler_pb2 as pb
from baton.scheduler.store import redis_wire as wire
from baton.scheduler.types import Reserved, WorkerRecord, name_of

WHOLE_S = 10.0  # s


class RedisFleet:
    """The workers alive. For one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._whole_at = 0.0  # on the clock
        self._revision = 0
        self._until: dict[str, float] = {}  # by worker: the end of its lease, ms of the server's clock
        self._drained: frozenset[str] = frozenset()
        self.workers: dict[str, WorkerRecord] = {}  # another one when identities change
        self.by_roles: dict[tuple[int, ...], list[WorkerRecord]] = {}  # as in `FleetView`

    @property
    def since(self) -> int:
        """The revision from which on changes are to be told; 0: all is."""
        return self._revision if self._clock() < self._whole_at else 0

    def learn(
        self,
        now: int,
        known: dict[str, pb.WorkerIdentity],
        drained: frozenset[str],
        *,
        revision: int,
        whole: bool,
        changed: Sequence[str],
        fleet: Sequence[wire.Flat],
    ) -> None:
        """Take what a view tells: the `whole` fleet, or those of it that `changed`.

        `fleet` are states, loads and leases, and what is booked in the order of `Reserved`'s fields.
        """
        states, loads, leases, *booked = fleet
        told = wire.workers(now, known, states=states, loads=loads, leases=leases, drained=drained)
        counted = [dict(wire.pairs(counters)) for counters in booked]
        for key, worker in told.items():
            worker.reserved = Reserved(*(int(counters.get(key, 0)) for counters in counted))
        until = {key: float(end) for key, end in wire.pairs(leases) if key in told}
        if whole:
            self._whole_at = self._clock() + WHOLE_S
            self.workers, self.by_roles, self._until = told, {}, until
        else:
            self._update(told, until, changed)
        if drained != self._drained:
            for worker in self.workers.values():
                worker.drain_asked = name_of(worker.identity) in drained
        self._revision, self._drained = revision, drained
        self._look_at_leases(now)

    def _update(self, told: dict[str, WorkerRecord], until: dict[str, float], changed: Sequence[str]) -> None:
        come: dict[str, WorkerRecord] = {}
        for key, worker in told.items():
            record = self.workers.get(key)
            # An export may have fetched the new identities already: no view of all follows then.
            if record is None or record.identity != worker.identity:
                come[key] = worker
            else:
                record.state, record.load, record.reserved = worker.state, worker.load, worker.reserved
        self._until |= until
        gone = self.workers.keys() & (set(changed) - told.keys())
        if come or gone:
            self._replace({key: one for key, one in (self.workers | come).items() if key not in gone})

    def _look_at_leases(self, now: int) -> None:
        over = set()
        for key, worker in self.workers.items():
            worker.lease_left_s = (self._until[key] - now) / 1_000
            if worker.lease_left_s <= 0:
                over.add(key)
        if over:
            self._replace({key: one for key, one in self.workers.items() if key not in over})

    def _replace(self, workers: dict[str, WorkerRecord]) -> None:
        self.workers, self.by_roles = workers, {}
        self._until = {key: self._until[key] for key in workers}
