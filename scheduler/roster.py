"""The live workers, in this scheduler's memory.

Each worker registers with all schedulers and sends heartbeats to all. A restarted scheduler
starts without workers, and hears from all of them within a heartbeat.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable

from baton.attempts import EPOCH_KEEP_S
from baton.protos import scheduler_pb2 as pb
from baton.scheduler.errors import StaleWorker
from baton.scheduler.ledger import Ledger, Past, forget
from baton.scheduler.types import FleetView, Heard, WorkerRecord, place_of

PEERS_AGE_S = 5.0  # references to peers' acceptance change slowly


class Roster:
    """The workers of a topic. Every method is one atomic step of the event loop.

    Invariants: a worker is alive or removed, never both; its epoch never falls while it is known; a record's
    `reserved` is the ledger's own object.
    """

    def __init__(
        self, topic: str, lease_s: float, ledger: Ledger, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Start without workers. A worker is dead if it sends nothing for `lease_s` seconds."""
        self._topic = topic
        self._lease_s = lease_s
        self._ledger = ledger
        self._clock = clock
        self._workers: dict[str, WorkerRecord] = {}
        self._gone: OrderedDict[str, Past] = OrderedDict()  # keyed by worker id
        self._first: pb.WorkerIdentity | None = None  # whose model all workers serve
        self._drained: frozenset[str] = frozenset()
        self._view: FleetView | None = None  # see FleetView
        self._none_ends_before = math.inf  # no lease expires before this

    def view(self) -> FleetView:
        self._sweep()
        if self._view is None:
            self._view = FleetView(dict(self._workers))
        return self._view

    def register(self, identity: pb.WorkerIdentity, state: pb.WorkerState) -> str:
        """Add or replace a worker; return in one line why it was refused, or an empty string.

        The first live worker decides which model the topic serves. vLLM's version and the model's revision
        may differ between workers, as they do during an upgrade. Raises StaleWorker when `identity.epoch` is
        below the worker's last one.
        """
        self._sweep()
        worker_id = identity.worker_id
        last = self._epoch_of(worker_id)
        if identity.epoch < last:
            raise StaleWorker(worker_id, identity.epoch, last)
        first = self._first
        if first is None or not self._workers.keys() - {worker_id}:
            self._first = identity
        elif identity.model != first.model:
            here = f"in topic {self._topic!r} (worker {first.worker_id})"
            return f"model {identity.model!r} here, {first.model!r} {here}: serve one model a topic"
        known = self._workers.get(worker_id)
        self._workers[worker_id] = WorkerRecord(
            identity=identity,
            state=state,
            load=known.load if known else None,
            reserved=self._ledger.join(worker_id),
            drain_asked=place_of(identity) in self._drained,
            heard_at=self._clock(),
            epoch=identity.epoch,
        )
        self._gone.pop(worker_id, None)
        self._none_ends_before = min(self._none_ends_before, self._clock() + self._lease_s)
        self._view = None
        return ""

    def heartbeat(self, worker_id: str, state: pb.WorkerState, load: pb.WorkerLoad, epoch: int = 0) -> Heard:
        """Extend a worker's lease, and update its load.

        Changes nothing if the worker is unknown, or if `epoch` is below its last one.
        """
        self._sweep()
        if epoch < self._epoch_of(worker_id):
            return Heard(known=False, drain=False, stale=True)
        worker = self._workers.get(worker_id)
        if worker is None:
            return Heard(known=False, drain=False)
        if worker.seat is not None and worker.state != state:
            self._view = None
        worker.state, worker.load, worker.epoch, worker.heard_at = state, load, epoch, self._clock()
        return Heard(known=True, drain=worker.drain_asked)

    def deregister(self, worker_id: str, epoch: int = 0) -> bool:
        """Remove a worker; return False, and change nothing, if `epoch` is below the worker's last one.

        Its departure is remembered even if it was unknown, because routers may know it. Bookings stay until
        the requests end.
        """
        if epoch < self._epoch_of(worker_id):
            return False
        self._remove(worker_id, epoch, over=True)
        return True

    def leader_of(self, gang: str) -> str:
        """Return the address of the newest rank 0 that is waiting for the rest of this gang, or ""."""
        leaders = [
            one.identity.address
            for one in self._workers.values()
            if one.seat is not None and one.seat[:3] == (gang, "", 0)
        ]
        return leaders[-1] if leaders else ""

    def left(self) -> tuple[str, ...]:
        return tuple(worker_id for worker_id, gone in self._gone.items() if gone.over)

    def drain(self, names: Iterable[str]) -> None:
        """Drain the workers with these names, present or future, and undrain all others."""
        drained = frozenset(names)
        if drained == self._drained:
            return
        self._drained = drained
        for worker in self._workers.values():
            worker.drain_asked = place_of(worker.identity) in drained
            if worker.seat is not None:
                self._view = None

    def _sweep(self) -> None:
        now = self._clock()
        if now >= self._none_ends_before:
            oldest = now - self._lease_s
            for worker in [one for one in self._workers.values() if one.heard_at <= oldest]:
                self._remove(worker.worker_id, worker.epoch, over=False)
            heard = min((one.heard_at for one in self._workers.values()), default=math.inf)
            self._none_ends_before = heard + self._lease_s
        forget(self._gone, now)

    def _remove(self, worker_id: str, epoch: int, *, over: bool) -> None:
        if self._workers.pop(worker_id, None):
            self._ledger.leave(worker_id)
            self._view = None
        self._gone.pop(worker_id, None)  # move it to the end, to be forgotten last
        self._gone[worker_id] = Past(epoch, self._clock() + EPOCH_KEEP_S, over)

    def _epoch_of(self, worker_id: str) -> int:
        known = self._workers.get(worker_id) or self._gone.get(worker_id)
        return known.epoch if known else 0


class Peers:
    """The best draft acceptance among the other workers with the same speculative method.

    Keeps the two best references of each method, refreshed every `PEERS_AGE_S`.
    """

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


HELD_UP_S = 2.0  # longest time without a tick; after more, heartbeats may still be unread


class Settling:
    """True for a while after the start, and after the process was held up.

    In that time all workers register or send a heartbeat. Rejections are not final until then: routers may
    know workers that this scheduler does not know yet.
    """

    def __init__(self, settle_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Every live worker must send a message within `settle_s` seconds."""
        self._settle_s = settle_s
        self._clock = clock
        self._ticked = clock()
        self._until = self._ticked + settle_s

    def tick(self) -> None:
        """Settle anew if the last call was over `HELD_UP_S` ago: the process was held up."""
        now = self._clock()
        if now - self._ticked > HELD_UP_S:
            self._until = now + self._settle_s
        self._ticked = now

    def __bool__(self) -> bool:
        self.tick()
        return self._clock() < self._until
