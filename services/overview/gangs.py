"""Gangs as units: which are whole, and what the others lack."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from baton.protos import scheduler_pb2 as pb

FORMING = "forming"


@dataclass(frozen=True, slots=True)
class Gang:
    """A gang, with the worker of each rank that was heard last."""

    name: str
    size: int
    members: dict[int, pb.WorkerStatus]  # keyed by rank

    @property
    def first(self) -> pb.WorkerIdentity:
        """The worker of the lowest rank."""
        return self.members[min(self.members)].identity

    @property
    def state(self) -> str:
        """Return `ready` if it takes requests, `drained`, `draining`, or `forming`."""
        members = self.members.values()
        if any(one.drained for one in members):
            return "drained"
        if any(one.state == pb.WORKER_STATE_DRAINING for one in members):
            return "draining"
        return FORMING if self.lacks else "ready"

    @property
    def lacks(self) -> str:
        """Say which of its ranks are not ready, and why; empty if all are."""
        found = []
        for rank in range(self.size):
            member = self.members.get(rank)
            if member is None:
                found.append(f"rank {rank} is missing")
            elif not member.identity.gang.life:
                found.append(f"rank {rank} waits for the others")
            elif member.state == pb.WORKER_STATE_STARTING:
                found.append(f"rank {rank} loads")
        lives = {one.identity.gang.life for one in self.members.values()}
        if not found and len(lives) > 1:
            found.append("its workers have not met each other")
        return ", ".join(found)

    @property
    def words(self) -> str:
        lacks = self.lacks
        return f"{self.name}: {self.state}{lacks and f' ({lacks})'}"

    @property
    def dummy_steps(self) -> int:
        return sum(one.load.dummy_steps for one in self.members.values())


def gangs_of(workers: Iterable[pb.WorkerStatus]) -> dict[str, Gang]:
    """Return the gangs by name."""
    found: dict[str, Gang] = {}
    for one in sorted(workers, key=lambda worker: -worker.heartbeat_age_s):
        if one.identity.HasField("gang"):
            mine = one.identity.gang
            found.setdefault(mine.name, Gang(mine.name, mine.size, {})).members[mine.rank] = one
    return dict(sorted(found.items()))


def state_of(worker: pb.WorkerStatus, gang: Gang | None) -> str:
    """Return a worker's state: `forming` if only the rest of its gang is not ready."""
    if worker.drained:
        return "drained"
    if worker.state == pb.WORKER_STATE_READY and gang is not None and gang.state == FORMING:
        return FORMING
    return pb.WorkerState.Name(worker.state).removeprefix("WORKER_STATE_").lower()
