"""Place without a scheduler: from the last snapshot, with the scheduler's own policy and limits.

A router does so while no scheduler answers, while one that has just started may not know all workers, and
while the scheduler has lost workers that the router can reach. This router's bookings are current, those of
other routers are as of the snapshot and count until their leases end. Workers refuse requests that do not
fit, and these are placed again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass

from baton.protos import scheduler_pb2 as pb
from baton.scheduler.booking import Assignment, booking_of, waits_for_slot
from baton.scheduler.need import Need
from baton.scheduler.policy import NoChoice, Policy
from baton.scheduler.types import (
    FleetView,
    PlacementLimits,
    PolicyOptions,
    Reserved,
    WorkerRecord,
    same_limits,
)

KEPT_S = 600.0  # s; the longest scheduler outage without an operator


class FleetCopy:
    """The fleet as of the last snapshot, updated with the changes that a scheduler sends (fleet_feed.py).

    Dictionaries are replaced, never changed, so any thread may read.
    """

    def __init__(self) -> None:
        self.feed = ""
        self.revision = 0
        self.workers: dict[str, pb.WorkerStatus] = {}  # keyed by id; bookings without this router's own
        self.encoders = False  # some of them are encode workers
        self.processes: list[pb.Process] = []
        self._all: dict[str, pb.WorkerStatus] = {}  # keyed by id; all bookings
        self._mine: set[str] = set()  # workers on which this router has bookings

    def learn(self, snapshot: pb.SnapshotReply) -> list[pb.WorkerStatus]:
        """Apply a snapshot; return the last status of the workers that it no longer has."""
        update = pb.FleetUpdate.FromString(snapshot.fleet)
        before, changed = self.workers, set(self._mine)
        everything = {} if update.whole else dict(self._all)
        for worker_id in update.gone:
            everything.pop(worker_id, None)
        for told in update.workers:
            worker_id = told.identity.worker_id
            status = pb.WorkerStatus()  # a copy: a submessage would keep the whole message in memory
            status.CopyFrom(told)
            if not status.identity.address and worker_id in everything:
                status.identity.CopyFrom(everything[worker_id].identity)
            everything[worker_id] = status
            changed.add(worker_id)
        self._take_off(snapshot, everything, changed)
        if update.HasField("processes"):
            self.processes = list(update.processes.processes)
        self.feed, self.revision = update.feed, update.revision
        return [status for worker_id, status in before.items() if worker_id not in everything]

    def _take_off(
        self, snapshot: pb.SnapshotReply, everything: dict[str, pb.WorkerStatus], changed: set[str]
    ) -> None:
        mine = {one.worker_id: one for one in snapshot.yours}
        workers = {key: self.workers[key] for key in everything if key in self.workers}
        for worker_id in (changed | mine.keys() | everything.keys() - workers.keys()) & everything.keys():
            status = workers[worker_id] = everything[worker_id]
            if own := mine.get(worker_id):
                workers[worker_id] = _less(status, own)
        self.workers = {key: workers[key] for key in everything}
        self.encoders = any(one.identity.role == pb.ROLE_ENCODE for one in everything.values())
        self._all, self._mine = everything, set(mine)


def _less(status: pb.WorkerStatus, own: pb.Booked) -> pb.WorkerStatus:
    found = pb.WorkerStatus()
    found.CopyFrom(status)
    found.reserved_prompt_tokens = max(0, status.reserved_prompt_tokens - own.prompt_tokens)
    found.reserved_requests = max(0, status.reserved_requests - own.requests)
    found.reserved_blocks = max(0, status.reserved_blocks - own.blocks)
    found.reserved_decoding = max(0, status.reserved_decoding - own.decoding)
    return found


@dataclass(frozen=True, slots=True)
class _Seen:
    status: pb.WorkerStatus
    at: float


class Standby:
    """The last snapshot. Belongs to one event loop, except for the thread-safe methods."""

    def __init__(
        self, policy: PolicyOptions | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._options = policy
        self._clock = clock
        self._limits: PlacementLimits | None = None
        self._policy: Policy | None = None
        self.fleet = FleetCopy()
        self._at = 0.0  # when the last snapshot came
        self._lost: dict[str, _Seen] = {}  # workers kept from earlier snapshots
        self.lease_s = 0.0  # lease of a placement

    def learn(self, snapshot: pb.SnapshotReply, reached: Container[str] = ()) -> None:
        """Replace the snapshot.

        Workers that deregistered are dropped. Other workers that are missing from it are kept while the
        scheduler settles or if this router has `reached` them: only their connection to the scheduler may be
        broken.
        """
        now = self._clock()
        missing = {one.identity.worker_id: _Seen(one, self._at) for one in self.fleet.learn(snapshot)}
        left = set(snapshot.left)
        self._lost = {
            key: value
            for key, value in (self._lost | missing).items()
            if key not in self.fleet.workers and key not in left and (snapshot.settling or key in reached)
        }
        self._at = now
        self.lease_s = snapshot.placement_lease_s
        if self._options and not (self._limits and same_limits(snapshot, self._limits)):
            self._limits = snapshot
            self._policy = Policy(snapshot, self._options)

    @property
    def keeps_lost(self) -> bool:
        """Whether workers that are missing from the last snapshot are kept."""
        return bool(self._lost)

    @property
    def workers(self) -> list[pb.WorkerStatus]:
        """The workers that may be chosen. Thread-safe."""
        oldest = self._clock() - KEPT_S
        return [seen.status for seen in self._seen() if seen.at >= oldest]

    def heard(self, within_s: float) -> list[pb.WorkerStatus]:
        """Return the workers whose last message is at most `within_s` seconds old. Thread-safe."""
        now = self._clock()
        return [one.status for one in self._seen() if now - one.at + one.status.heartbeat_age_s <= within_s]

    def _seen(self) -> list[_Seen]:
        at = self._at
        return [*self._lost.values(), *(_Seen(status, at) for status in self.fleet.workers.values())]

    def place(self, need: Need, mine: Mapping[str, Reserved]) -> Assignment | NoChoice | None:
        """Choose workers; return None if none is known. `mine`: this router's bookings by worker id."""
        workers = self._workers(mine)
        if self._policy is None or self._limits is None or not workers:
            return None
        choice = self._policy.choose(FleetView(workers), need)
        if isinstance(choice, NoChoice):
            return choice
        booked = booking_of(need, choice.prefill, choice.decode)
        return Assignment(choice.prefill, choice.decode, booked, waits=waits_for_slot(choice.decode))

    def _workers(self, mine: Mapping[str, Reserved]) -> dict[str, WorkerRecord]:
        now = self._clock()
        found = {}
        for seen in self._seen():
            age_s = now - seen.at
            if age_s > KEPT_S:
                continue
            status = seen.status
            worker_id = status.identity.worker_id
            valid = age_s <= self.lease_s  # after that, other routers' bookings have expired
            reserved = Reserved()
            if valid:
                reserved.add(_booked(status))
            reserved.add(mine.get(worker_id, Reserved()))
            found[worker_id] = WorkerRecord(
                identity=status.identity,
                state=status.state,
                load=status.load if valid and status.HasField("load") else None,
                reserved=reserved,
                drain_asked=False,  # implied by the state
                heard_at=seen.at - status.heartbeat_age_s,
            )
        return found


def _booked(status: pb.WorkerStatus) -> Reserved:
    return Reserved(
        prompt_tokens=status.reserved_prompt_tokens,
        requests=status.reserved_requests,
        blocks=status.reserved_blocks,
        decoding=status.reserved_decoding,
    )
