"""Send routers the changes to the fleet since their last request.

The reply is serialized once for all routers at a revision. It contains the whole fleet if a router's revision
is too old or of another feed. Bookings are the totals of all routers; a router subtracts its own. A worker's
identity is sent once. A heartbeat is not a change: if a worker is not mentioned, its last message is
less than half a lease old.
"""

from __future__ import annotations

import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.protos import scheduler_pb2 as pb
from baton.scheduler.types import FleetView, WorkerRecord

GONE_KEPT = 4_096  # departed workers remembered; a router that lacks more gets everything


@dataclass(slots=True)
class _Row:
    identity: pb.WorkerIdentity
    load: pb.WorkerLoad | None
    rest: tuple[object, ...]
    status: pb.WorkerStatus  # its identity has only the id
    identified: int  # revision in which the identity changed
    changed: int  # revision in which anything changed


class FleetFeed:
    """Serve one scheduler's feed. Belongs to one event loop."""

    def __init__(self, worker_lease_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._id = uuid.uuid4().hex
        self._silent_s = worker_lease_s / 2  # once a worker is silent for longer, its age is sent each time
        self._clock = clock
        self._refreshed = 0.0
        self._revision = 0
        self._rows: dict[str, _Row] = {}
        self._gone: deque[tuple[int, str]] = deque()  # revision, worker; oldest first
        self._oldest = 0  # all departures since this revision are known
        self._processes: tuple[int, list[pb.Process]] = (0, [])  # revision in which they changed, processes
        self._made: dict[int, bytes] = {}  # revision -> serialized changes since then

    def age_s(self) -> float:
        return self._clock() - self._refreshed if self._revision else float("inf")

    def refresh(self, view: FleetView, processes: Sequence[pb.Process]) -> None:
        """Start a new revision. Called about twice a second, however many routers there are."""
        self._refreshed = self._clock()
        self._revision += 1
        self._made = {}
        for worker_id, worker in view.workers.items():
            self._update(worker_id, worker)
        for worker_id in self._rows.keys() - view.workers.keys():
            del self._rows[worker_id]
            self._gone.append((self._revision, worker_id))
        while len(self._gone) > GONE_KEPT:
            self._oldest = self._gone.popleft()[0]
        if list(processes) != self._processes[1]:
            self._processes = self._revision, list(processes)

    def since(self, feed: str, revision: int) -> bytes:
        """Return a serialized FleetUpdate for a router with this revision of that feed."""
        known = feed == self._id and self._oldest <= revision <= self._revision
        since = revision if known else 0
        made = self._made.get(since)
        if made is None:
            made = self._made[since] = self._make(since).SerializeToString()
        return made

    def _update(self, worker_id: str, worker: WorkerRecord) -> None:
        reserved = worker.reserved
        age_s = self._refreshed - worker.heard_at
        rest = (
            *(reserved.prompt_tokens, reserved.requests, reserved.blocks, reserved.decoding),
            *(worker.state, worker.drain_asked, age_s if age_s > self._silent_s else 0.0),
        )
        row = self._rows.get(worker_id)
        if row and row.identity is worker.identity and row.load is worker.load and row.rest == rest:
            return
        status = status_of(worker, age_s, pb.WorkerIdentity(worker_id=worker_id))
        if age_s <= self._silent_s:
            status.heartbeat_age_s = 0.0
        if row is None or row.identity != worker.identity:
            now = self._revision
            self._rows[worker_id] = _Row(worker.identity, worker.load, rest, status, now, now)
            return
        row.identity, row.load, row.rest = worker.identity, worker.load, rest
        if row.status != status:
            row.status, row.changed = status, self._revision

    def _make(self, since: int) -> pb.FleetUpdate:
        update = pb.FleetUpdate(feed=self._id, revision=self._revision, whole=not since)
        if since:
            update.gone.extend(worker_id for revision, worker_id in self._gone if revision > since)
        for row in self._rows.values():
            if row.changed <= since:
                continue
            status = update.workers.add()
            status.CopyFrom(row.status)
            if row.identified > since:
                status.identity.CopyFrom(row.identity)
        if self._processes[0] > since or not since:
            update.processes.CopyFrom(pb.Processes(processes=self._processes[1]))
        return update


def status_of(
    record: WorkerRecord, age_s: float, identity: pb.WorkerIdentity | None = None
) -> pb.WorkerStatus:
    """Return a worker's status message. `age_s`: seconds since its last message."""
    state = pb.WORKER_STATE_DRAINING if record.drain_asked else record.state
    return pb.WorkerStatus(
        identity=identity or record.identity,
        state=state,
        load=record.load,
        heartbeat_age_s=max(0.0, age_s),
        reserved_prompt_tokens=record.reserved.prompt_tokens,
        reserved_requests=record.reserved.requests,
        reserved_blocks=record.reserved.blocks,
        reserved_decoding=record.reserved.decoding,
        drained=record.held,
    )
