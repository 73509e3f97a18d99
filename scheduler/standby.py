"""Place without a scheduler, from its last snapshot.

A router does so while no scheduler answers, while one that has just started may not know all workers, and
when the scheduler has lost workers that the router itself reaches. Then:

- Only workers of a snapshot are chosen, by the scheduler's own policy and limits. Workers that died since are
  known by their broken streams (`exclude`).
- Others' bookings count, as of the snapshot, until their leases are over; this router's own count as they are
  now. Routers do not see each other's bookings: workers refuse what does not fit, and it is placed again.
- A worker that was in no snapshot for `KEPT_S` is no longer chosen.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass

from baton.protos import scheduler_pb2 as pb
from baton.scheduler.booking import Assignment, booking_of, waits_for_slot
from baton.scheduler.fleet_copy import FleetCopy
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

KEPT_S = 600.0  # s; the longest scheduler outage that an operator may sleep through


@dataclass(frozen=True, slots=True)
class _Seen:
    status: pb.WorkerStatus
    at: float


class Standby:
    """Keep the last snapshot and place from it. Belongs to one event loop."""

    def __init__(
        self, policy: PolicyOptions | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._options = policy
        self._clock = clock
        self._limits: PlacementLimits | None = None
        self._policy: Policy | None = None
        self._fleet = FleetCopy()
        self._at = 0.0  # when the last snapshot came
        self._lost: dict[str, _Seen] = {}  # kept workers of earlier snapshots that are not in the last one
        self.lease_s = 0.0  # lease of a placement

    def learn(self, snapshot: pb.SnapshotReply, reached: Container[str] = ()) -> None:
        """Place from this snapshot from now on.

        Workers that are no longer in it go, but not while a scheduler settles, nor those that this router has
        `reached`: only their connection to the scheduler may be cut. Workers that deregistered go at once.
        """
        now = self._clock()
        missing = {one.identity.worker_id: _Seen(one, self._at) for one in self._fleet.learn(snapshot)}
        left = set(snapshot.left)
        self._lost = {
            key: value
            for key, value in (self._lost | missing).items()
            if key not in self._fleet.workers and key not in left and (snapshot.settling or key in reached)
        }
        self._at = now
        self.lease_s = snapshot.placement_lease_s
        if self._options and not (self._limits and same_limits(snapshot, self._limits)):
            self._limits = snapshot
            self._policy = Policy(snapshot, self._options)

    @property
    def has(self) -> tuple[str, int]:
        """The feed and revision of the last snapshot, so that the next one need only contain changes."""
        return self._fleet.feed, self._fleet.revision

    @property
    def keeps_lost(self) -> bool:
        """Whether workers of earlier snapshots that are not in the last one are kept."""
        return bool(self._lost)

    @property
    def processes(self) -> list[pb.Process]:
        return self._fleet.processes

    @property
    def workers(self) -> list[pb.WorkerStatus]:
        """The workers that may be chosen; none before the first snapshot. Thread-safe."""
        oldest = self._clock() - KEPT_S
        return [seen.status for seen in self._seen() if seen.at >= oldest]

    def heard(self, within_s: float) -> list[pb.WorkerStatus]:
        """Return the workers heard within `within_s` seconds. Thread-safe."""
        now = self._clock()
        return [one.status for one in self._seen() if now - one.at + one.status.heartbeat_age_s <= within_s]

    def _seen(self) -> list[_Seen]:
        """Return all workers with the time of the last snapshot that had them."""
        at = self._at
        return [*self._lost.values(), *(_Seen(status, at) for status in self._fleet.workers.values())]

    def place(self, need: Need, mine: Mapping[str, Reserved]) -> Assignment | NoChoice | None:
        """Choose workers; None when no worker is known. `mine`: this router's bookings by worker id."""
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
            valid = age_s <= self.lease_s  # others' bookings expire: nobody can have renewed them
            reserved = Reserved()
            if valid:
                reserved.add(_booked(status))
            reserved.add(mine.get(worker_id, Reserved()))
            found[worker_id] = WorkerRecord(
                identity=status.identity,
                state=status.state,
                load=status.load if valid and status.HasField("load") else None,
                reserved=reserved,
                drain_asked=False,  # its state says so
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
