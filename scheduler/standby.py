"""Placing without a scheduler: from the last snapshot that it gave.

A router uses this while no scheduler answers, and while one that has just begun may not know all workers.
Then:

- Only workers of a snapshot are chosen, by the scheduler's own policy and limits. Those that died since are
  known by their broken streams (`exclude`).
- Bookings of others count, as of the snapshot, until their leases are over; those of this router count as
  they are. Several routers do not see each other's bookings: at worst each of them fills the room that all
  of them saw.
- A worker that was in no snapshot for `KEPT_S` is not chosen any more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from baton.protos import scheduler_pb2 as pb
from baton.scheduler.booking import Assignment, claim, waits_for_slot
from baton.scheduler.policy import NoChoice, Policy
from baton.scheduler.types import (
    FleetView,
    Known,
    Need,
    PlacementLimits,
    PolicyOptions,
    Reserved,
    WorkerRecord,
    held,
    same_limits,
)

KEPT_S = 600.0  # s; the longest absence of a scheduler that an operator may sleep through


@dataclass(frozen=True, slots=True)
class _Seen:
    status: pb.WorkerStatus
    at: float


class Standby:
    """The last snapshot, and placements from it. Used in one event loop."""

    def __init__(
        self, policy: PolicyOptions | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._options = policy
        self._clock = clock
        self._limits: PlacementLimits | None = None
        self._policy: Policy | None = None
        self._seen: dict[str, _Seen] = {}  # by worker id
        self.lease_s = 0.0  # of a placement

    def learn(self, snapshot: pb.SnapshotReply) -> None:
        """Place from this snapshot from now on. While a scheduler settles, only workers that left go."""
        now = self._clock()
        seen = {status.identity.worker_id: _Seen(status, now) for status in snapshot.workers}
        before = {key: value for key, value in self._seen.items() if key not in snapshot.left}
        self._seen = {**before, **seen} if snapshot.settling else seen
        self.lease_s = snapshot.placement_lease_s
        if self._options and not (self._limits and same_limits(snapshot, self._limits)):
            self._limits = snapshot
            self._policy = Policy(snapshot, self._options)

    @property
    def workers(self) -> list[pb.WorkerStatus]:
        """The workers that may be chosen; none before the first snapshot."""
        oldest = self._clock() - KEPT_S
        return [seen.status for seen in self._seen.values() if seen.at >= oldest]

    def heard(self, within_s: float) -> list[pb.WorkerStatus]:
        """Return the workers whose last heartbeat is not older than that.

        Safe in any thread, as snapshots are replaced as a whole.
        """
        now = self._clock()
        seen = self._seen.values()
        return [one.status for one in seen if now - one.at + one.status.heartbeat_age_s <= within_s]

    def place(self, need: Need, mine: Iterable[Known]) -> Assignment | NoChoice | None:
        """Choose workers, beside what this router holds already (`mine`); None when no worker is known."""
        workers = self._workers(mine)
        if self._policy is None or self._limits is None or not workers:
            return None
        view = FleetView(workers, live_attempts=0, expired=0)
        choice = self._policy.choose(view, need)
        if isinstance(choice, NoChoice):
            return choice
        booked = claim(need, choice.prefill, choice.decode, self._limits).booking
        return Assignment(choice.prefill, choice.decode, booked, waits_for_slot(choice.decode))

    def _workers(self, mine: Iterable[Known]) -> dict[str, WorkerRecord]:
        now = self._clock()
        own = held(mine)
        found = {}
        for worker_id, seen in self._seen.items():
            age_s = now - seen.at
            if age_s > KEPT_S:
                continue
            status = seen.status
            valid = age_s <= self.lease_s  # others' bookings: nobody can have renewed them
            reserved = Reserved()
            if valid:
                reserved.add(_booked(status))
            reserved.add(own.get(worker_id, Reserved()))
            found[worker_id] = WorkerRecord(
                identity=status.identity,
                state=status.state,
                load=status.load if valid and status.HasField("load") else None,
                reserved=reserved,
                drain_asked=False,  # its state says so
                lease_left_s=KEPT_S - age_s,
            )
        return found


def _booked(status: pb.WorkerStatus) -> Reserved:
    return Reserved(
        prompt_tokens=status.reserved_prompt_tokens,
        requests=status.reserved_requests,
        blocks=status.reserved_blocks,
        decoding=status.reserved_decoding,
    )
