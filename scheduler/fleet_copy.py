"""A router's copy of the fleet, kept up to date with the changes that a scheduler sends (fleet_feed.py)."""

from __future__ import annotations

from baton.protos import scheduler_pb2 as pb


class FleetCopy:
    """The fleet as of the last snapshot. Dictionaries are replaced, never changed, so any thread may read."""

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
